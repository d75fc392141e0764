"""One daemon thread that looks at the engine a few times a second and ends the process when it has to.

Guards add a check; a check returns nothing while all is well, and calls `fatal` when it is not. The thread also runs
the engine's clock, by which stalls are told: time in which nothing could have been delivered does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..core import report
from . import fatal
from .state import engine

POLL = 0.2  # seconds between two looks

_checks: list[Callable[[], None]] = []
_start_once = threading.Lock()


def add(check: Callable[[], None]) -> None:
    """Have `check` called in the watchdog's thread every POLL seconds."""
    _checks.append(check)


def start() -> None:
    """Start the thread, once."""
    if _start_once.acquire(blocking=False):
        threading.Thread(target=_run, name="mlx-shim-watchdog", daemon=True).start()


def _run() -> None:
    before = time.monotonic()
    while not fatal.begun(POLL):
        now = time.monotonic()
        if not engine.loading and not engine.stopping:
            # A longer gap means that this thread did not run either: the process was suspended, or the machine slept.
            engine.clock += min(now - before, 2 * POLL)
        before = now
        for check in list(_checks):
            try:
                check()
            except Exception as error:
                _checks.remove(check)
                report.mark_failed(
                    check.__module__.rpartition(".")[2],
                    f"its check failed and is off from now on: {error!r}",
                )
