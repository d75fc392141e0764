"""The interpreter stands still: native code holds the GIL, and no Python thread runs.

The watchdog does not run either: only a C thread can act then. Here
faulthandler's timer is armed for MLX_SHIM_GIL_DEADLINE before the server begins to load its model,
and the watchdog arms it again as long as Python runs. When the time is over, faulthandler dumps all
stacks and ends the process with status 1. While stderr is a pipe that is not read, it ends the
process without the stacks. A process has one such timer: a program that uses it itself keeps it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import stat
import struct
import termios
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

# With more bytes unread in stderr's pipe its reader is behind, and the stacks may not find room.
MOST_UNREAD = 4096

# When the timer was last armed, by time.monotonic; 0 where it is not.
_armed_at = 0.0
# `.call` says whether this thread calls faulthandler for the shim.
_own = threading.local()
# A descriptor of /dev/null, once it was needed.
_nowhere: int | None = None
# Whether the program uses the timer itself.
_foreign = False


def probe(server: Any) -> None:
    if report.stderr_fd() is None:
        raise Incompatible("stderr is closed, and faulthandler has nowhere to write")


def apply(server: Any) -> None:
    patch.wrap(faulthandler, "dump_traceback_later", _program_arms)
    patch.wrap(faulthandler, "cancel_dump_traceback_later", _program_cancels)
    watchdog.add(_rearm, first=True)


def _rearm() -> None:
    """Called before the server starts, then by the watchdog.

    Arming starts a thread (50 µs), so not every call does it.
    """
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
        _call(faulthandler.dump_traceback_later, deadline, exit=True, file=_destination())


def _destination() -> int | None:
    """Return where the stacks go: stderr, or /dev/null while stderr is a pipe that is not read.

    faulthandler would wait for a reader, and not end the process.
    """
    global _nowhere
    fd = report.stderr_fd()
    if fd is None or _has_room(fd):
        return fd
    if _nowhere is None:
        _nowhere = os.open(os.devnull, os.O_WRONLY)
    return _nowhere


def _has_room(fd: int) -> bool:
    try:
        if not select.select([], [fd], [], 0)[1]:
            return False
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return True
        unread = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * struct.calcsize("i"))
        return int(struct.unpack("i", unread)[0]) <= MOST_UNREAD
    # The descriptor was closed in the meantime: a write fails, and does not wait.
    except OSError:
        return True


def _call(function: Any, *args: Any, **kwargs: Any) -> None:
    _own.call = True
    try:
        function(*args, **kwargs)
    finally:
        _own.call = False


def _is_own() -> bool:
    return getattr(_own, "call", False)


def _program_arms(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    global _foreign
    if not _is_own() and not _foreign:
        _foreign = True
        report.line(
            "the program uses faulthandler.dump_traceback_later itself: "
            "MLX_SHIM_GIL_DEADLINE is not watched"
        )
    return wrapped(*args, **kwargs)


def _program_cancels(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    global _foreign
    if not _is_own() and _foreign:
        _foreign = False
        report.line(
            "the program has given faulthandler's timer back: "
            "MLX_SHIM_GIL_DEADLINE is watched again"
        )
    return wrapped(*args, **kwargs)
