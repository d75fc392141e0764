"""The only place that ends the process. Exit codes are a contract, listed in docs/exit-codes.md."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from . import report
from .engine import engine

STOPPED = 0  # asked to stop, and did
EX_SOFTWARE = 70  # the generation thread died after it had come up
EX_OSERR = 71  # could not listen
EX_CONFIG = 78  # it never came up: the model could not be loaded, or MLX_SHIM_STRICT refused

# Seconds from a death to the exit, whatever the traceback's printer, a full pipe or a hanging hook does meanwhile.
REPORT_LIMIT = 0.8

_first = threading.Lock()
_prepared = threading.Lock()
_begun = threading.Event()
_status = EX_SOFTWARE
_verdict = ""
_said = False


def end(status: int, reason: str, show: Callable[[], None] | None = None) -> NoReturn:
    """Report in one line and end the process with `status`, by os._exit and in the calling thread.

    There is no interpreter teardown: the teardown of a thread that used mlx has crashed (mlx 4347, 4110), and a
    non-daemon thread would be waited for. `show` runs first: it prints the traceback through the hooks that the
    program had in place. Where it hangs, the thread that `prepare` started ends the process all the same.
    """
    global _status, _verdict
    if not _first.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it and ends us too
    _status = status
    _verdict = f"fatal: {reason}; {engine.in_flight} in flight; up {engine.uptime:.1f} s; exit {status}"
    _begun.set()
    try:
        _run(show)
        _say()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(status)


def _run(show: Callable[[], None] | None) -> None:
    """Whatever a hook of the program does, SystemExit included, the verdict still follows."""
    try:
        if show is not None:
            show()
    except BaseException as error:
        report.line(f"the traceback could not be shown: {error!r}")


def begun(timeout: float = 0) -> bool:
    """Whether the end has begun; waits for that for at most `timeout` seconds."""
    return _begun.wait(timeout) if timeout else _begun.is_set()


def prepare() -> None:
    """Start the thread that makes an end certain. It exists before it is needed: a dying process may not get another."""
    if _prepared.acquire(blocking=False):
        threading.Thread(target=_enforce, name="mlx-shim-fatal", daemon=True).start()


def _enforce() -> NoReturn:
    """Once the end has begun, end the process REPORT_LIMIT seconds later if the thread that began it has not."""
    _begun.wait()
    threading.Event().wait(REPORT_LIMIT)
    try:
        if not _said:
            report.line_at_once(_verdict)
    finally:
        os._exit(_status)


def _say() -> None:
    global _said
    report.line(_verdict)
    _said = True
