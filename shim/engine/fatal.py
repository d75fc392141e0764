"""Ends the process; no other module does. docs/exit-codes.md lists the exit codes, a contract."""

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

# The server was asked to stop, and has stopped.
STOPPED = 0
# The generation thread died or stalled after it had come up.
EX_SOFTWARE = 70
# The server could not listen.
EX_OSERR = 71
# The process should be started again: it has reached a limit of MLX_SHIM_RECYCLE_*, or stays above
# a limit of memory.
EX_TEMPFAIL = 75
# The server never came up: the model could not be loaded, a key file or a passed socket cannot be
# used, the shim cannot do what MLX_SHIM_WIRED asks for, or MLX_SHIM_STRICT refused.
EX_CONFIG = 78

# Seconds from a death to the exit, even if a hook hangs, or the printing of the traceback, or a
# full pipe.
REPORT_LIMIT = 0.8
# Seconds for clients whose connection was accepted when the end began: they are answered 503.
ACCEPTED_GRACE = 0.2

# Called before the exit, with the status.
_notes: list[Callable[[int], None]] = []
# The thread that holds this lock ends the process.
_first = threading.Lock()
_prepared = threading.Lock()
_begun = threading.Event()
_status = EX_SOFTWARE
# The last line, and whether it was written.
_verdict = ""
_said = False


def die(
    status: int,
    reason: str,
    show: Callable[[], None] | None = None,
    error: BaseException | None = None,
    tell: errors.ShimError | None = None,
) -> NoReturn:
    """Tell waiting clients, report in one line, and end the process with `status`.

    The calling thread calls os._exit. It skips the interpreter's teardown: the teardown of a thread
    that used mlx has crashed (mlx 4347, 4110), and it would wait for non-daemon threads. `show`
    prints the traceback through the hooks that the program has installed. `tell` is the error that
    clients get, within MLX_SHIM_EXIT_GRACE. If any of this hangs, the thread that `prepare` started
    ends the process.
    """
    _take(
        status,
        f"fatal: {reason}; {engine.in_flight} in flight; up {engine.uptime:.1f} s; exit {status}",
    )
    deadline = time.monotonic() + settings.current.exit_grace
    # Before anything that may fail: from here on the end is certain.
    _begun.set()
    facts = None
    try:
        facts = gather_facts(reason, error)
        _attempt("tell the clients", lambda: engine.fail_waiting(tell or errors.engine_dead()))
        if show is not None:
            _attempt("show the traceback", show)
        _report_end(error, facts)
        engine.wait_for_handlers(deadline - time.monotonic())
    finally:
        os._exit(status)


def exit_orderly(status: int, reason: str, facts: dict[str, Any] | None = None) -> NoReturn:
    """End a process that was asked to end and has nothing more to do; there is no fault.

    This skips the interpreter's teardown too. `facts`, if given, become a report in
    MLX_SHIM_REPORT_DIR.
    """
    _take(status, f"stopped: {reason}; up {engine.uptime:.1f} s; exit {status}")
    _begun.set()
    try:
        engine.wait_for_handlers(ACCEPTED_GRACE)
        _report_end(None, facts)
    finally:
        os._exit(status)


def _take(status: int, verdict: str) -> None:
    """Make the calling thread the one that ends the process. Any other thread waits here."""
    global _status, _verdict
    if not _first.acquire(blocking=False):
        threading.Event().wait()
    _status, _verdict = status, verdict


def gather_facts(reason: str, error: BaseException | None = None) -> dict[str, Any] | None:
    """Gather the facts for a report, or return None if that fails.

    Call this before the clients are told, because then the entries of their requests close.
    """
    try:
        return crash_report.facts(reason, error)
    except Exception as failed:
        report.line_nowait(f"could not gather the facts for a report: {failed!r}")
        return None


def _report_end(error: BaseException | None, facts: dict[str, Any] | None) -> None:
    # The notes come first: writing the last line may take all the time that is left.
    for note in _notes:
        _attempt("note the end", functools.partial(note, _status))
    _say()
    if settings.current.report_dir and facts is not None:
        _attempt("write the report", lambda: crash_report.write(_status, error, facts))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def call_at_end(note: Callable[[int], None]) -> None:
    """Register `note(status)`, to be called before the exit and after the clients are told.

    It has to be quick, and must not hang.
    """
    _notes.append(note)


def begun(timeout: float = 0) -> bool:
    """Whether the end has begun. Waits for it for at most `timeout` seconds."""
    return _begun.wait(timeout) if timeout else _begun.is_set()


def prepare() -> None:
    """Start the thread that makes an end certain.

    It starts early, because a dying process may be unable to start a thread.
    """
    if _prepared.acquire(blocking=False):
        threading.Thread(target=_enforce, name="mlx-shim-fatal", daemon=True).start()


def _enforce() -> NoReturn:
    """Wait until the end has begun, and end the process if the other thread does not in time."""
    _begun.wait()
    threading.Event().wait(max(REPORT_LIMIT, settings.current.exit_grace))
    try:
        if not _said:
            report.line_nowait(_verdict)
    finally:
        os._exit(_status)


def _attempt(what: str, step: Callable[[], None]) -> None:
    """Run a step, and report an exception in it, so that the next step follows in any case."""
    # A hook of the program may even raise SystemExit.
    try:
        step()
    except BaseException as error:
        report.line(f"could not {what}: {error!r}")


def _say() -> None:
    global _said
    report.line(_verdict)
    _said = True
