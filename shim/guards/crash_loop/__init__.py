"""A server that dies as soon as it is up is started again and again, and loads its model each time: the machine is lost.

A supervisor's pause between starts is short and ever the same. Here deaths are noted in a state file, and after
MLX_SHIM_BREAKER the next start waits before it loads the model, ever longer, while it answers: /health says `breaker`,
requests get 503 with Retry-After, and the supervisor sees a living job. A run whose model was up for longer than the
breaker's duration clears it. After a kill while a large model was loaded it also waits, a minute at most, for the
memory to be free. What goes wrong with the file is said in one line and is in nobody's way.
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

POLL = 0.1  # seconds after which a stop is noticed
READ_LIMIT = 2.0  # seconds a start waits for the folder; a dead network file system never answers
NOTE_LIMIT = 0.2  # seconds an end does: within fatal.REPORT_LIMIT
STEP = 64 << 20  # bytes: less is no sign that memory is being given back
SETTLED = 5.0  # seconds without such a sign
MEMORY_LIMIT = 60.0  # seconds
LARGE = 2**30  # bytes: a smaller model has room
SHARE = 0.8  # of the machine's memory, all that is waited for: compressed, a process may hold more than there is
_NO_DEATHS = (fatal.STOPPED, fatal.EX_OSERR, fatal.EX_TEMPFAIL)


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
    """In the generation thread, outside stock's try: nothing of ours may raise here."""
    journal = None
    try:
        journal = _before(instance)
    except Exception as error:
        report.line(f"crash_loop failed, the model is loaded at once: {error!r}")
        if _journal is not None:
            _journal.post(
                _journal.note_loading
            )  # else this run, should it die, is taken for one that had only waited
    if engine.closing:
        if engine.generator is not None and not engine.distributed:
            engine.ask_to_stop()  # else the loop that comes next takes what is queued, and loads its model
        return None
    result = wrapped(*args, **kwargs)
    if journal is not None:
        journal.post(journal.note_up)
    return result


def _before(provider: Any) -> Journal:
    """What comes before the load: the waits. Once in a process: a program may stop one server and start another."""
    global _journal
    if _journal is not None:
        _journal.post(_journal.note_loading)
        return _journal
    arguments = anatomy.arguments_of(provider)
    rank = engine.rank  # of several machines, or processes, that share a model
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
            f"{why}: waiting for {seconds:.0f} s, until {until}, before the model is loaded ({way_out})"
        )
        wait(why, seconds)
        report.line(
            "the server is stopping"
            if engine.closing
            else "the wait is over, the model is being loaded"
        )
    wait_for_memory(state)
    journal.post(journal.note_loading)
    return journal


def wait(why: str, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
    """Hold the start for so long, or until `over()`; a stop ends it. Meanwhile the server answers, and no stall is told."""
    engine.start_wait = hold = Hold(why, time.monotonic() + seconds)
    engine.loading += 1  # the engine's clock rests
    try:
        while (left := hold.until - time.monotonic()) > 0 and not engine.closing and not over():
            threading.Event().wait(min(left, POLL))
    finally:
        engine.loading -= 1
        engine.start_wait = None


def wait_for_memory(state: State) -> None:
    """After a kill: until what the model took is free, which a dead process may give back late."""
    needed = state.model or state.footprint
    whole, free = memory.total(), memory.available()
    if engine.closing or not state.killed or needed < LARGE or whole is None or free is None:
        return
    needed = min(needed, int(whole * SHARE))
    if free >= needed:
        return
    why = f"the last run was killed, and of the {memory.format_bytes(needed)} that it took {memory.format_bytes(free)} are free"
    report.line(
        f"{why}: waiting for the rest for at most {MEMORY_LIMIT:.0f} s before the model is loaded"
    )
    wait(why, MEMORY_LIMIT, _Freed(needed, free))
    free = memory.available() or 0
    report.line(
        f"{memory.format_bytes(free)} are free{'' if free >= needed else ', no more'}: the wait is over"
    )


class _Freed:
    """Whether enough memory is available, or none is being given back any more: others may hold it for good."""

    def __init__(self, needed: int, free: int) -> None:
        self._needed = needed
        self._most, self._since = free, time.monotonic()

    def __call__(self) -> bool:
        free, now = memory.available() or self._needed, time.monotonic()
        if free > self._most + STEP:
            self._most, self._since = free, now
        return free >= self._needed or now - self._since >= SETTLED


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    hold = engine.start_wait
    if hold is None or engine.closing:
        return wrapped(*args, **kwargs)
    answers.refuse(instance, errors.breaker(hold.reason, hold.seconds_left))
    return None


def _check(entry: Entry) -> None:
    """Asked about a request that came before the wait began."""
    hold = engine.start_wait
    if hold is not None:
        raise errors.breaker(hold.reason, hold.seconds_left)


def _stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Asked to stop: whatever follows, SIGKILL by a supervisor without patience included, is no death."""
    journal = _journal
    if journal is not None and instance is engine.generator:
        journal.post(lambda: journal.note_end(None), NOTE_LIMIT)
    return wrapped(*args, **kwargs)


def _ends_by_itself(pid: int) -> None:
    """A program that comes to its end has not died. (A child of a fork has no keeper, and is none of ours.)"""
    if os.getpid() == pid:
        _end(fatal.STOPPED)


def _end(status: int) -> None:
    journal = _journal
    if journal is not None:
        journal.post(lambda: journal.note_end(None if status in _NO_DEATHS else status), NOTE_LIMIT)
