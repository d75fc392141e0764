"""One daemon thread that looks at the engine a few times a second and ends the process when it has to.

Guards add a check; a check returns nothing while all is well, and calls `fatal` when it is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from . import fatal, report

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
    while not fatal.begun(POLL):
        for check in list(_checks):
            try:
                check()
            except Exception as error:
                _checks.remove(check)
                report.line(f"watchdog: a check failed and is off from now on: {check.__module__}: {error!r}")
