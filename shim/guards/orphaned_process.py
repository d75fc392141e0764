"""The server ends, but its generation thread keeps the process alive: no client can reach it.

The generation thread is started before the port is bound, and it is not a daemon. If the port is
taken, stock raises OSError in the main thread and then waits for the generation thread without end.
The model stays loaded, and the supervisor does not notice. Here the process ends when the main
thread ends, for whatever reason: with 71 if the server could not listen, with 0 after Ctrl-C,
otherwise with 70.
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

UPSTREAM = (
    "no issue known; mlx_lm/server.py starts the thread in ResponseGenerator.__init__, before it "
    "binds the port"
)
MODULE = "mlx_lm.server"
LIVES_BY = {"starts": "a generator for which no server ran is found within a second, or not at all"}


def probe(server: Any) -> None:
    if not verdicts.has(server, "run") and not verdicts.has(server, "_run_http_server"):
        raise Incompatible(f"{server.__name__} has neither run nor _run_http_server")


def apply(server: Any) -> None:
    watchdog.add(_check)


def _check() -> None:
    """Called by the watchdog. Python has then printed the exception that ended the main thread."""
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
        # By Ctrl-C, or by a handler of the program.
        fatal.die(fatal.STOPPED, "asked to end before the server could stop by itself")
    what = f": {type(error).__name__}: {report.one_line(error)}" if error is not None else ""
    if error is not None and _could_not_listen(error):
        fatal.die(fatal.EX_OSERR, f"could not listen{what}")
    fatal.die(fatal.EX_SOFTWARE, f"the main thread ended while the generation thread lives{what}")


def _is_left(generator: Any) -> bool:
    """Whether its thread lives and was not asked to stop."""
    thread = anatomy.parts_of(generator).thread
    return thread is not None and thread.is_alive() and not anatomy.is_asked_to_stop(generator)


def _caller_is_over() -> bool:
    """Whether the thread that ran the server, usually the main thread, has nothing more to do.

    After an error in `run` the main thread may also be alive in name only: it waits in
    threading._shutdown for threads that may never end, or it prints the traceback through a hook
    that hangs or into a full pipe.
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
