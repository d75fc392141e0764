"""Native code that holds the GIL for ever: only faulthandler's C thread can end that, unless the program uses it itself."""

from __future__ import annotations

import contextlib
import textwrap
import time

import pytest

from conftest import FaultyModel
from kit.harness import START, Server, expect_zombie, wait_until

DEADLINE = {
    "MLX_SHIM_GIL_DEADLINE": "6s"
}  # a busy machine may keep an interpreter waiting for a while


def frozen(server, model):
    model.fire()
    server.send_and_leave({"prompt": "x"})


@pytest.mark.guard("frozen_interpreter")
@pytest.mark.control("frozen_interpreter")
def test_a_frozen_interpreter_ends_with_1(line, tmp_path):
    """Beside one without the guard, the control, which is frozen for longer."""
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


# The watchdog does not look within the test's patience: only what came before can help.
NO_LOOK = """
import sys
from mlx_lm.server import main
watchdog = next(m for name, m in sys.modules.items() if name.endswith("shim.engine.watchdog"))
watchdog.POLL = 600.0
main()
"""
FOREVER = 10**6  # seconds


@pytest.mark.guard("frozen_interpreter")
@pytest.mark.control("frozen_interpreter")
@pytest.mark.parametrize("look", ["before the first look", "whenever it looks"])
@pytest.mark.parametrize("at", ["the load", "the first request"])
def test_frozen_right_after_the_start(look, at, line, tmp_path):
    """Beside one without the guard, the control. A fresh interpreter: it is about a start."""
    freezes = {"load_native": FOREVER, "load_holds_gil": True} if at == "the load" else {}
    model = FaultyModel(tmp_path / "faulty", kind="hold_gil", **freezes)
    model.fire()
    program = tmp_path / "program.py"
    program.write_text(NO_LOOK)
    entry = (str(program),) if look.startswith("before") else ("-m", "mlx_lm", "server")
    off = DEADLINE | {"MLX_SHIM_FROZEN_INTERPRETER": "0"}
    made = {"args": model.args, "entry": entry, "fresh": True}
    with (
        Server(line, model.path, tmp_path / "off", environ=off, **made) as control,
        Server(line, model.path, tmp_path / "log", environ=DEADLINE, **made) as server,
    ):
        if at != "the load":
            ask_as_soon_as_it_listens(server, control)
        assert server.wait_exit(60) == 1
        assert "Timeout (0:00:06)!" in server.text()
        expect_zombie(control)


def ask_as_soon_as_it_listens(*servers):
    waiting = list(servers)
    deadline = time.monotonic() + START
    while waiting and time.monotonic() < deadline:
        for server in list(waiting):
            with contextlib.suppress(ConnectionRefusedError):
                server.send_and_leave({"prompt": "x"})
                waiting.remove(server)
        time.sleep(0.005)
    assert not waiting, servers[0].text()


@pytest.mark.guard("frozen_interpreter")
@pytest.mark.parametrize("how", ["python", "native"])
def test_a_long_load_that_leaves_the_gil_alone_goes_on(how, line, faulty, tmp_path):
    """In Python, and in native code without the GIL, as MLX is while it reads weights."""
    model = faulty(kind="none", **{"load_delay" if how == "python" else "load_native": 15})
    with Server(
        line, model.path, tmp_path / "log", args=model.args, environ=DEADLINE, fresh=True
    ) as server:
        server.ready()
        assert "Timeout" not in server.text()


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
