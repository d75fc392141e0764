"""The main thread ends while the generation thread lives: a process that nobody can reach, and that never exits.

The generation thread is started before the port is bound and is no daemon. With the port taken, stock raises OSError
in main and then waits for that thread for ever, the model loaded, no supervisor the wiser. Whatever ends main, the
process ends too: 71 where it could not listen, 0 where Ctrl-C asked for it, else 70.
"""

from __future__ import annotations

import threading
import traceback
from typing import Any

from .. import fatal, patch, report, watchdog
from ..engine import engine
from . import require

UPSTREAM = "no issue known; the thread of mlx_lm/server.py is started in ResponseGenerator.__init__, before the bind"
MODULE = "mlx_lm.server"
NEEDS_WRAPT = False


def probe(server: Any) -> None:
    require(server, "run", "ResponseGenerator.__init__")


def apply(server: Any) -> None:
    patch.wrap(server, "run", _run)
    watchdog.add(_check)


def _run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Only remember what ended main. Python prints it as ever; the watchdog acts when main is gone."""
    try:
        return wrapped(*args, **kwargs)
    except BaseException as error:
        engine.main_error = error
        raise


def _check() -> None:
    thread = engine.generation_thread
    if threading.main_thread().is_alive() or thread is None or not thread.is_alive() or engine.stopping:
        return
    error = engine.main_error
    if error is None:
        fatal.end(fatal.EX_SOFTWARE, "the main thread ended while the generation thread lives")
    what = report.one_line(f"{type(error).__name__}: {error}")
    if isinstance(error, KeyboardInterrupt):
        fatal.end(fatal.STOPPED, "interrupted before the server could stop by itself")
    if isinstance(error, OSError) and not _was_serving(error):
        fatal.end(fatal.EX_OSERR, f"could not listen: {what}")
    fatal.end(fatal.EX_SOFTWARE, f"the main thread ended while the generation thread lives: {what}")


def _was_serving(error: BaseException) -> bool:
    return any(frame.f_code.co_name == "serve_forever" for frame, _ in traceback.walk_tb(error.__traceback__))
