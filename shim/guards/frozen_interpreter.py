"""The interpreter stands still: native code holds the GIL, and no Python thread runs.

The watchdog does not run either: only a C thread can act then. Here the watchdog arms
faulthandler's timer for MLX_SHIM_GIL_DEADLINE, and arms it again as long as Python runs. When the
time is over, faulthandler dumps all stacks and ends the process with status 1. A process has one
such timer: a program that uses it itself keeps it.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from typing import Any

from ..core import patch, report, settings
from ..core.verdicts import Incompatible
from ..engine import watchdog
from ..engine.state import engine

UPSTREAM = "mlx-lm 1834; no upstream issue names the GIL"
MODULE = "mlx_lm.server"
SETTINGS = ("gil_deadline",)

# When the timer was last armed, by time.monotonic; 0 where it is not.
_armed_at = 0.0
# The thread that calls faulthandler for the shim, while it does so.
_ours = 0
# Whether the program uses the timer itself.
_foreign = False


def probe(server: Any) -> None:
    if report.stderr_fd() is None:
        raise Incompatible("stderr is closed, and faulthandler has nowhere to write")


def apply(server: Any) -> None:
    patch.wrap(faulthandler, "dump_traceback_later", _program_arms)
    patch.wrap(faulthandler, "cancel_dump_traceback_later", _program_cancels)
    watchdog.add(_rearm)


def _rearm() -> None:
    """Called by the watchdog. Re-arming starts a thread (50 µs), so not every call does it."""
    global _armed_at
    deadline = settings.current.gil_deadline
    if _foreign:
        return
    # A drain stays watched: it ends by itself, unless the interpreter stands still.
    if engine.stopping and not engine.draining:
        if _armed_at:
            _armed_at = 0.0
            _call(faulthandler.cancel_dump_traceback_later)
        return
    now = time.monotonic()
    if now - _armed_at >= min(1.0, deadline / 4):
        _armed_at = now
        _call(faulthandler.dump_traceback_later, deadline, exit=True, file=report.stderr_fd())


def _call(function: Any, *args: Any, **kwargs: Any) -> None:
    global _ours
    _ours = threading.get_ident()
    try:
        function(*args, **kwargs)
    finally:
        _ours = 0


def _program_arms(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    global _foreign
    if _ours != threading.get_ident() and not _foreign:
        _foreign = True
        report.line(
            "the program uses faulthandler.dump_traceback_later itself: "
            "MLX_SHIM_GIL_DEADLINE is not watched"
        )
    return wrapped(*args, **kwargs)


def _program_cancels(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    global _foreign
    if _ours != threading.get_ident() and _foreign:
        _foreign = False
        report.line(
            "the program has given faulthandler's timer back: "
            "MLX_SHIM_GIL_DEADLINE is watched again"
        )
    return wrapped(*args, **kwargs)
