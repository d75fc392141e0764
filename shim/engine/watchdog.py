"""The watchdog: a daemon thread that looks at the engine every POLL seconds.

Guards add checks. A check returns while all is well, and calls `fatal` when the process has to end.
The thread also runs the engine's clock, which measures stalls: it leaves out the time in which
nothing could have been delivered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..core import report
from . import fatal
from .state import engine

# Seconds between two looks.
POLL = 0.2

_checks: list[Callable[[], None]] = []
_start_once = threading.Lock()


def add(check: Callable[[], None]) -> None:
    """Make the watchdog's thread call `check` every POLL seconds."""
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
            # After a longer gap this thread did not run either: the process was suspended, or the
            # machine slept.
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
