"""The only place that ends the process. Exit codes are a contract, listed in docs/exit-codes.md."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ..core import errors, report, settings
from . import crash_report
from .state import engine

STOPPED = 0  # asked to stop, and did
EX_SOFTWARE = 70  # the generation thread died or stalled after it had come up
EX_OSERR = 71  # could not listen
EX_TEMPFAIL = 75  # wants to be started again: a limit of MLX_SHIM_RECYCLE_* is reached, or one of memory for good
# It never came up: the model could not be loaded, a key file or a passed socket cannot be used, what MLX_SHIM_WIRED asks
# for cannot be given, or MLX_SHIM_STRICT refused.
EX_CONFIG = 78

# Seconds from a death to the exit, whatever the traceback's printer, a full pipe or a hanging hook does meanwhile.
REPORT_LIMIT = 0.8
LET_IN = (
    0.2  # seconds for clients whose connection was accepted as the end began: they are told 503
)

_notes: list[Callable[[int], None]] = []
_first = threading.Lock()
_prepared = threading.Lock()
_begun = threading.Event()
_status = EX_SOFTWARE
_verdict = ""
_said = False
# By time.monotonic.
_begun_at = 0.0


def die(
    status: int,
    reason: str,
    show: Callable[[], None] | None = None,
    error: BaseException | None = None,
    tell: errors.ShimError | None = None,
) -> NoReturn:
    """Tell waiting clients, report in one line, and end the process with `status`, by os._exit in the calling thread.

    There is no interpreter teardown: the teardown of a thread that used mlx has crashed (mlx 4347, 4110), and a
    non-daemon thread would be waited for. `show` prints the traceback through the hooks that the program had in place;
    `tell` is what clients get, within MLX_SHIM_EXIT_GRACE. Where anything of this hangs, the thread that `prepare`
    started ends the process all the same.
    """
    _take(
        status,
        f"fatal: {reason}; {engine.in_flight} in flight; up {engine.uptime:.1f} s; exit {status}",
    )
    deadline = time.monotonic() + settings.current.exit_grace
    _begun.set()  # before anything that may fail: from here on the end is certain
    facts = None
    try:
        facts = gathered(reason, error)
        _attempt("tell the clients", lambda: engine.fail_waiting(tell or errors.engine_dead()))
        if show is not None:
            _attempt("show the traceback", show)
        _leave_word(error, facts)
        engine.wait_for_handlers(deadline - time.monotonic())
        _finish_log()
    finally:
        os._exit(status)


def exit_orderly(status: int, reason: str, facts: dict[str, Any] | None = None) -> NoReturn:
    """End the process, of which nobody expects anything any more, as it was asked to: no fault, and no teardown either.

    `facts`, where there are any, become a report in MLX_SHIM_REPORT_DIR.
    """
    _take(status, f"stopped: {reason}; up {engine.uptime:.1f} s; exit {status}")
    _begun.set()
    try:
        engine.wait_for_handlers(LET_IN)
        _leave_word(None, facts)
        _finish_log()
    finally:
        os._exit(status)


def _take(status: int, verdict: str) -> None:
    """Be the one that ends the process; any other thread waits here until it is over."""
    global _status, _verdict, _begun_at
    if not _first.acquire(blocking=False):
        threading.Event().wait()
    _status, _verdict, _begun_at = status, verdict, time.monotonic()


def gathered(reason: str, error: BaseException | None = None) -> dict[str, Any] | None:
    """What a report says, gathered before the clients are told and their entries close. None where that fails."""
    try:
        return crash_report.facts(reason, error)
    except Exception as failed:
        report.line_nowait(f"could not gather the facts for a report: {failed!r}")
        return None


def _leave_word(error: BaseException | None, facts: dict[str, Any] | None) -> None:
    for note in _notes:  # first: to say it may take until there is no time left
        _attempt("note the end", functools.partial(note, _status))
    _say()
    if settings.current.report_dir and facts is not None:
        _attempt("write the report", lambda: crash_report.write(_status, error, facts))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _finish_log() -> None:
    """Wait until the log is written, while there is time. Where it is stuck, the verdict may still find room."""
    if not report.flush(_begun_at + REPORT_LIMIT - time.monotonic()):
        report.line_at_end(_verdict)


def at_end(note: Callable[[int], None]) -> None:
    """Have `note(status)` called before the exit, after the clients are told. It has to be quick, and must not hang."""
    _notes.append(note)


def begun(timeout: float = 0) -> bool:
    """Whether the end has begun; waits for that for at most `timeout` seconds."""
    return _begun.wait(timeout) if timeout else _begun.is_set()


def prepare() -> None:
    """Start the thread that makes an end certain. It exists before it is needed: a dying process may not get another."""
    if _prepared.acquire(blocking=False):
        threading.Thread(target=_enforce, name="mlx-shim-fatal", daemon=True).start()


def _enforce() -> NoReturn:
    """Once the end has begun, end the process when its time is over, if the thread that began it has not."""
    _begun.wait()
    threading.Event().wait(max(REPORT_LIMIT, settings.current.exit_grace))
    try:
        if not _said:
            report.line_at_end(_verdict)
    finally:
        os._exit(_status)


def _attempt(what: str, step: Callable[[], None]) -> None:
    """Whatever a step does, SystemExit from a hook of the program included, the next one still follows."""
    try:
        step()
    except BaseException as error:
        report.line(f"could not {what}: {error!r}")


def _say() -> None:
    global _said
    report.line(_verdict)
    _said = True
