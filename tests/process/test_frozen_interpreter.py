"""Native code never releases the GIL: only faulthandler's C thread can end that.

It cannot where the program uses it itself.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time

import pytest

from conftest import FaultyModel
from kit.harness import LINES, NEWEST, START, Server, expect_zombie, wait_until

# A busy machine may keep an interpreter waiting for a while.
DEADLINE = {"MLX_SHIM_GIL_DEADLINE": "6s"}


def frozen(server, model):
    model.fire()
    server.send_and_leave({"prompt": "x"})


@pytest.mark.guard("frozen_interpreter")
@pytest.mark.control("frozen_interpreter")
def test_a_frozen_interpreter_ends_with_1(line, tmp_path):
    """The control, without the guard, stays frozen for longer."""
    model, other = (FaultyModel(tmp_path / name, kind="hold_gil") for name in ("faulty", "other"))
    off = DEADLINE | {"MLX_SHIM_FROZEN_INTERPRETER": "0"}
    with (
        Server(line, other.path, tmp_path / "off", args=other.args, environ=off) as control,
        Server(line, model.path, tmp_path / "log", args=model.args, environ=DEADLINE) as server,
    ):
        frozen(control.ready(), other)
        server.ready()
        time.sleep(7)
        frozen(server, model)
        assert server.wait_exit(60) == 1
        assert "Timeout (0:00:06)!" in server.text()
        assert "in misbehave\n" in server.text()
        expect_zombie(control)


# The watchdog does not look while the test runs: only a timer that was armed before can help.
NO_LOOK = """
import sys
from mlx_lm.server import main
watchdog = next(m for name, m in sys.modules.items() if name.endswith("shim.engine.watchdog"))
watchdog.POLL = 600.0
main()
"""
# Seconds: longer than any test.
FOREVER = 10**6
# Short, since the servers below either freeze or do little.
SHORT = {"MLX_SHIM_GIL_DEADLINE": "4s"}


@pytest.mark.guard("frozen_interpreter")
@pytest.mark.control("frozen_interpreter")
def test_a_load_that_holds_the_gil_ends_with_1(line, faulty, tmp_path):
    """The control, without the guard, runs at the same time."""
    model = faulty(kind="none", load_native=FOREVER, load_holds_gil=True)
    program = tmp_path / "program.py"
    program.write_text(NO_LOOK)
    off = SHORT | {"MLX_SHIM_FROZEN_INTERPRETER": "0"}
    made = {"args": model.args, "entry": (str(program),)}
    with (
        Server(line, model.path, tmp_path / "off", environ=off, **made) as control,
        Server(line, model.path, tmp_path / "log", environ=SHORT, **made) as server,
    ):
        assert server.wait_exit(60) == 1
        assert "Timeout (0:00:04)!" in server.text()
        assert 'model.py", line' in server.text()
        assert wait_until(lambda: model.loads == 2, START)
        expect_zombie(control, patience=1.0)


@pytest.mark.guard("frozen_interpreter")
def test_a_long_load_that_leaves_the_gil_alone_goes_on(tmp_path):
    """In Python on one line, in native code (as MLX reads weights) on the other, both at once."""
    loads = ("load_delay", "load_native")
    models = [FaultyModel(tmp_path / kind, kind="none", **{kind: 6}) for kind in loads]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                Server(line, model.path, tmp_path / line, args=model.args, environ=SHORT)
            )
            for line, model in zip(LINES, models, strict=True)
        ]
        for server in servers:
            server.ready()
            assert "Timeout" not in server.text()


@pytest.mark.guard("frozen_interpreter")
def test_it_ends_where_stderr_is_not_read(tmp_path):
    """faulthandler itself would wait for a reader."""
    model = FaultyModel(tmp_path / "faulty", kind="hold_gil")
    reader, writer = os.pipe()
    with Server(
        NEWEST,
        model.path,
        tmp_path / "log",
        args=model.args,
        environ=DEADLINE | {"MLX_SHIM_BLOCKING_LOG": "1"},
        stderr=writer,
    ) as server:
        server.ready()
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 512)
        os.set_blocking(writer, True)
        # The watchdog arms the timer once a second.
        time.sleep(2)
        frozen(server, model)
        assert server.wait_exit(60) == 1
    os.close(reader)
    os.close(writer)


@pytest.mark.guard("frozen_interpreter")
def test_somebody_elses_use_of_the_timer_is_respected(line, tiny, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import faulthandler, threading, mlx_lm.server
        threading.Timer(3, lambda: faulthandler.dump_traceback_later(2, exit=False)).start()
        mlx_lm.server.main()
    """)
    )
    with Server(
        line,
        tiny,
        tmp_path / "log",
        entry=(str(program),),
        environ={"MLX_SHIM_GIL_DEADLINE": "60s"},
    ) as server:
        server.ready()
        assert wait_until(lambda: "Timeout (0:00:02)!" in server.text(), 30)
        assert any(
            "uses faulthandler.dump_traceback_later itself" in x for x in server.shim_lines()
        )
        assert server.alive
