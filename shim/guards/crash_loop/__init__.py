"""A server that dies right after its start is started again, and loads its model each time.

This goes on without end. Each start keeps the whole machine busy, and the supervisor's pause
between starts is short and always the same. Here the guard notes deaths in a state file. After as
many deaths as MLX_SHIM_BREAKER says, the next start waits before it loads the model, longer each
time. The server answers during the wait: /health says `breaker`, requests get 503 with
Retry-After, and the supervisor sees a running job. A run whose model was loaded for longer than
the breaker's duration clears the deaths.

After a kill while a large model was loaded, the start also waits until the memory is free, at
most a minute. An error with the file costs one line on stderr, and never stops the start.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ...core import answers, errors, memory, patch, report, settings
from ...core.verdicts import require
from ...engine import anatomy, facts, fatal, queues
from ...engine.entries import Entry
from ...engine.state import Hold, engine
from . import backoff, state_file
from .journal import Journal
from .state_file import State, StateFile

UPSTREAM = "no issue known; with generation_death a fault of every start becomes a loop"
MODULE = "mlx_lm.server"
LIVES_BY = {"boot": facts.NEEDED}

# Seconds between two looks during a wait: a stop is noticed after so long.
WAIT_POLL = 0.1
# Seconds that a start waits for the folder: a dead network file system never answers.
READ_LIMIT = 2.0
# Seconds that an end waits for the folder; less than fatal.REPORT_LIMIT.
NOTE_LIMIT = 0.2
# Bytes by which free memory has to grow to show that the system still gives memory back.
FREED_STEP = 64 << 20
# Seconds without such growth after which the wait for memory ends.
FREED_PATIENCE = 5.0
# Seconds that a start waits for memory at most.
MEMORY_WAIT = 60.0
# Bytes of a model above which a start waits for memory: a smaller model finds room.
LARGE_MODEL = 2**30
# The share of the machine's memory that a start waits for at most. With compressed memory a process
# may have held more than the machine has.
LARGEST_SHARE = 0.8
# Statuses of ends that are not deaths.
_ORDERLY = (fatal.STOPPED, fatal.EX_OSERR, fatal.EX_TEMPFAIL)


def probe(server: Any) -> None:
    require(server, "ModelProvider.load_default", "APIHandler.do_POST")


def apply(server: Any) -> None:
    patch.wrap(server, "ModelProvider.load_default", _load_default)
    patch.try_wrap(server, "ResponseGenerator.stop_and_join", _stop_and_join)
    patch.wrap(server, "APIHandler.do_POST", _do_post)
    queues.checks.append(_check)
    fatal.call_at_end(_end)
    atexit.register(_ends_by_itself, os.getpid())


_journal: Journal | None = None


def _load_default(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """In the generation thread, outside stock's try: the shim must not raise here."""
    journal = None
    try:
        journal = _before(instance)
    except Exception as error:
        report.line(f"crash_loop failed, the model is loaded at once: {error!r}")
        if _journal is not None:
            # Without this note this run, if it dies, would count as one that had only waited.
            _journal.post(_journal.note_loading)
    if engine.closing:
        if engine.generator is not None and not engine.distributed:
            # Else the loop that follows would take a queued request, and load its model.
            engine.ask_to_stop()
        return None
    result = wrapped(*args, **kwargs)
    if journal is not None:
        journal.post(journal.note_up)
    return result


def _before(provider: Any) -> Journal:
    """Wait, where that is due, before the load.

    Only the first server of a process waits: a program may stop one and start another.
    """
    global _journal
    if _journal is not None:
        _journal.post(_journal.note_loading)
        return _journal
    arguments = anatomy.arguments_of(provider)
    # Which one of several machines, or processes, that share a model.
    rank = engine.rank
    named = [getattr(arguments, name, None) for name in ("host", "port", "model")]
    setting, name = settings.current.state_dir, state_file.key(*named, *([rank] if rank else []))
    journal = _journal = Journal(lambda: StateFile(state_file.folder(setting), name))
    seconds, state = journal.post(journal.begin, READ_LIMIT) or (0.0, State())
    limit = settings.current.breaker
    if seconds and limit:
        why = backoff.reason(state.deaths, limit)
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        way_out = "MLX_SHIM_BREAKER; MLX_SHIM_CRASH_LOOP=0 starts at once"
        report.line(
            f"{why}: waiting for {seconds:.0f} s, until {until}, before the model is loaded "
            f"({way_out})"
        )
        wait(why, seconds)
        over = "the wait is over, the model is being loaded"
        report.line("the server is stopping" if engine.closing else over)
    wait_for_memory(state)
    journal.post(journal.note_loading)
    return journal


def wait(why: str, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
    """Hold the start for `seconds`, or until `over()`, or until the server is asked to stop.

    Meanwhile the server answers, and the wait does not count as a stall.
    """
    engine.start_wait = hold = Hold(why, time.monotonic() + seconds)
    # Stops the engine's clock.
    engine.loading += 1
    try:
        while (left := hold.until - time.monotonic()) > 0 and not engine.closing and not over():
            threading.Event().wait(min(left, WAIT_POLL))
    finally:
        engine.loading -= 1
        engine.start_wait = None


def wait_for_memory(state: State) -> None:
    """After a kill wait until the model's memory is free: a dead process may give it back late."""
    needed = state.model or state.footprint
    whole, free = memory.total(), memory.available()
    if engine.closing or not state.killed or needed < LARGE_MODEL or whole is None or free is None:
        return
    needed = min(needed, int(whole * LARGEST_SHARE))
    if free >= needed:
        return
    why = (
        f"the last run was killed, and of the {memory.format_bytes(needed)} that it took "
        f"{memory.format_bytes(free)} are free"
    )
    report.line(
        f"{why}: waiting for the rest for at most {MEMORY_WAIT:.0f} s before the model is loaded"
    )
    wait(why, MEMORY_WAIT, _Freed(needed, free))
    free = memory.available() or 0
    enough = "" if free >= needed else ", no more"
    report.line(f"{memory.format_bytes(free)} are free{enough}: the wait is over")


class _Freed:
    """Whether enough memory is free, or no more is becoming free.

    Other programs may hold the rest for good.
    """

    def __init__(self, needed: int, free: int) -> None:
        self._needed = needed
        self._most, self._since = free, time.monotonic()

    def __call__(self) -> bool:
        free, now = memory.available() or self._needed, time.monotonic()
        if free > self._most + FREED_STEP:
            self._most, self._since = free, now
        return free >= self._needed or now - self._since >= FREED_PATIENCE


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    hold = engine.start_wait
    if hold is None or engine.closing:
        return wrapped(*args, **kwargs)
    answers.refuse(instance, errors.breaker(hold.reason, hold.seconds_left))
    return None


def _check(entry: Entry) -> None:
    """Refuse a request that came before the wait began."""
    hold = engine.start_wait
    if hold is not None:
        raise errors.breaker(hold.reason, hold.seconds_left)


def _stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note the stop: what follows is not a death, not even SIGKILL by an impatient supervisor."""
    journal = _journal
    if journal is not None and instance is engine.generator:
        journal.post(lambda: journal.note_end(None), NOTE_LIMIT)
    return wrapped(*args, **kwargs)


def _ends_by_itself(pid: int) -> None:
    """Note that a program has come to its end, which is not a death.

    Not in a forked child, which has no keeper thread.
    """
    if os.getpid() == pid:
        _end(fatal.STOPPED)


def _end(status: int) -> None:
    journal = _journal
    if journal is not None:
        journal.post(lambda: journal.note_end(None if status in _ORDERLY else status), NOTE_LIMIT)
