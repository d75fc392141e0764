"""Native code never releases the GIL: only faulthandler's C thread can end that.

It cannot where the program uses it itself.
"""

from __future__ import annotations

import textwrap
import time

import pytest

from conftest import FaultyModel
from kit.harness import Server, expect_zombie, wait_until

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
