"""The app or shell that started the server is gone; the server keeps the port, and memory.

The next start then fails. A child outlives its parent unless a signal ends it, and an app that is
killed sends none. Here, with MLX_SHIM_PARENT=1, the server drains when the process that started it
is gone. The status is 0. Only that process counts: a wrapper that stays hides the end of the app
that started the wrapper. One line says that there is no parent to watch if the first process of a
system or a container started the server, or if the parent was gone before Python ran.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from ..core import report
from ..core.verdicts import Incompatible
from ..engine import drain, watchdog

UPSTREAM = "no issue known; mlx_lm/server.py does not look at its parent"
MODULE = "mlx_lm.server"
SETTINGS = ("parent",)
_NO_WAIT = "requests in flight are not waited for"
LIVES_BY = {("handlers", "answers"): _NO_WAIT, ("turns", "boot", "deliveries"): _NO_WAIT}

NO_PARENT = (
    "there is no parent to watch: the process that started this one was gone before, "
    "or it is the first of the system"
)
# On macOS a debugger takes the place of the parent while it is attached, and an orphan goes to the
# first process. Elsewhere an orphan may go to any process that takes up orphans (a subreaper).
_DEBUGGERS_ARE_PARENTS = sys.platform == "darwin"


@dataclass(frozen=True)
class Birth:
    """Which process this is, and which process started it: None if that cannot be watched."""

    child: int
    parent: int | None


def birth() -> Birth:
    """Return what can be seen now."""
    parent = os.getppid()
    return Birth(os.getpid(), None if _has_adopted(parent) else parent)


def _has_adopted(parent: int) -> bool:
    """Whether `parent` has certainly not started this process.

    A process begins in the session of its parent, and leaves it only to lead a new one.
    """
    if parent <= 1:
        return True
    try:
        return os.getsid(0) not in (os.getpid(), os.getsid(parent))
    except OSError:
        # The parent has just gone.
        return False


# Taken just before mlx_lm is imported: the parent may be gone when the import is over.
_birth = birth()
# Whether the drain was asked for.
_asked = False


def probe(server: Any) -> None:
    if _birth.parent is None:
        raise Incompatible(NO_PARENT)


def apply(server: Any) -> None:
    drain.install(server)
    watchdog.add(_check)


def _check() -> None:
    """Called by the watchdog."""
    global _birth, _asked
    if _birth.child != os.getpid():
        # The program has forked since.
        _birth = birth()
    if _birth.parent is None:
        report.once(f"deserted_server: {NO_PARENT}")
    elif not _asked and _is_gone(_birth.parent):
        _asked = True
        drain.start()
        # It does not hurry: whatever ended the parent may have sent this process a signal too.
        drain.ask(drain.Order(f"its parent, process {_birth.parent}, is gone", hurries=False))


def _is_gone(parent: int) -> bool:
    now = os.getppid()
    return now != parent and (now <= 1 or not _DEBUGGERS_ARE_PARENTS)
