"""The server is gone and its generation thread lives: a process that nobody can reach, and that never exits.

The generation thread is started before the port is bound and is no daemon. With the port taken, stock raises OSError
in main and then waits for that thread for ever. The model stays loaded, and no supervisor notices. Here the process ends
when main does, whatever ended that: 71 where it could not listen, 0 where Ctrl-C asked for it, else 70.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import traceback
from typing import Any

from ..core import report, verdicts
from ..core.verdicts import Incompatible
from ..engine import anatomy, fatal, watchdog
from ..engine.state import engine

UPSTREAM = "no issue known; the thread of mlx_lm/server.py is started in ResponseGenerator.__init__, before the bind"
MODULE = "mlx_lm.server"


LIVES_BY = {"starts": "a generator that no server ran for is found within a second, if it is found"}


def probe(server: Any) -> None:
    if not verdicts.has(server, "run") and not verdicts.has(server, "_run_http_server"):
        raise Incompatible(f"{server.__name__} has neither run nor _run_http_server")


def apply(server: Any) -> None:
    watchdog.add(_check)


def _check() -> None:
    """Called by the watchdog. Python has printed by then what ended main."""
    if (
        engine.running
        or not _caller_is_over()
        or not any(_is_left(generator) for generator in engine.living())
    ):
        return
    error = engine.run_error
    if isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and error.code in (None, 0)
    ):
        fatal.die(
            fatal.STOPPED, "asked to end before the server could stop by itself"
        )  # by Ctrl-C, or its own handler
    what = f": {type(error).__name__}: {report.one_line(error)}" if error is not None else ""
    if error is not None and _could_not_listen(error):
        fatal.die(fatal.EX_OSERR, f"could not listen{what}")
    fatal.die(fatal.EX_SOFTWARE, f"the main thread ended while the generation thread lives{what}")


def _is_left(generator: Any) -> bool:
    """Whether its thread lives and nobody has asked it to stop."""
    thread = anatomy.parts_of(generator).thread
    return thread is not None and thread.is_alive() and not anatomy.is_asked_to_stop(generator)


def _caller_is_over() -> bool:
    """Whether the thread that ran the server, main as a rule, will not do anything more.

    After an error in `run` that is also so where main is alive by name only: it waits in threading._shutdown for threads
    that may never end, or Python is busy with the traceback, in a hook that hangs or a pipe that is full.
    """
    if not engine.runner.is_alive():
        return True
    if engine.run_error is None or engine.runner is not threading.main_thread():
        return False
    frame = sys._current_frames().get(engine.runner.ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def _could_not_listen(error: BaseException) -> bool:
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    names, files = {code.co_name for code in codes}, {code.co_filename for code in codes}
    binding = "_run_http_server" in names or files & {socket.__file__, socketserver.__file__}
    return isinstance(error, Exception) and bool(binding) and "serve_forever" not in names
