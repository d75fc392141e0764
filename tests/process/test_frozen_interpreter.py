"""Native code that holds the GIL for ever: only faulthandler's C thread can end that, unless the program uses it itself."""

from __future__ import annotations

import textwrap
import time

from harness import Server, expect_zombie, wait_until


def test_a_frozen_interpreter_ends_with_1(line, faulty, tmp_path):
    model = faulty(kind="hold_gil")
    with Server(line, model.path, tmp_path / "log", args=model.args, environ={"MLX_SHIM_GIL_DEADLINE": "3s"}) as server:
        server.ready()
        time.sleep(4)
        model.fire()
        server.send_and_leave({"prompt": "x"})
        assert server.wait_exit(60) == 1
        assert "Timeout (0:00:03)!" in server.text()
        assert "in misbehave\n" in server.text()
    model.trigger.unlink()
    environ = {"MLX_SHIM_GIL_DEADLINE": "3s", "MLX_SHIM_FROZEN_INTERPRETER": "0"}
    with Server(line, model.path, tmp_path / "off", args=model.args, environ=environ) as server:
        server.ready()
        model.fire()
        server.send_and_leave({"prompt": "x"})
        time.sleep(7)
        expect_zombie(server)


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
        line, tiny, tmp_path / "log", entry=(str(program),), environ={"MLX_SHIM_GIL_DEADLINE": "60s"}
    ) as server:
        server.ready()
        assert wait_until(lambda: "Timeout (0:00:02)!" in server.text(), 30)
        assert any("uses faulthandler.dump_traceback_later itself" in x for x in server.shim_lines())
        assert server.alive
