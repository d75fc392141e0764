"""The journal of this run and those before it, kept in the state file by a thread of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from typing import Any

from ...core import memory, report, settings
from ...core.values import Limit
from ...engine.state import engine
from . import backoff, state_file
from .backoff import Death
from .state_file import LOADING, UP, WAITING, Run, State, StateFile

TICK = 1.0  # seconds between two looks at the run
SEEN = 60.0  # seconds between two notes that it lives, and what it holds
LATELY = 120.0  # seconds after which a dead process has given its memory back, or never will
JITTER = 0.1  # of a wait, at most: servers that were brought down together do not load their models together
_GOOD_RUN = 600.0  # seconds, where there is no breaker


class Journal:
    """What is noted of this run and those before it. All but `post` is called in the keeper's thread."""

    def __init__(self, make: Callable[[], StateFile], now: Callable[[], float] = time.time) -> None:
        self._make = make
        self._now = now
        self._file: StateFile | None = None
        self._up_since: float | None = None
        self._seen = 0.0
        self._keeper = state_file.Keeper(self.look, TICK)
        self._late = False  # it did not answer in time once, and is not waited for again
        self.state = State()

    def post(self, job: Callable[[], Any], limit: float = 0) -> Any:
        """Have `job` done, and wait for that for so many seconds. Says what goes wrong; None then, or without waiting."""
        outcome = self._keeper.post(lambda: self._framed(job))
        try:
            return outcome.result(limit) if limit and not self._late else None
        except futures.TimeoutError:  # on Python 3.10 not the one among the builtins
            self._late = True
            report.line(
                f"the folder of MLX_SHIM_STATE_DIR has not answered for {limit:g} s: it is not waited for"
            )
            return None

    def _framed(self, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except state_file.Held:
            report.once(
                "another process serves this model at this host and port: deaths are noted by that one alone"
            )
        except (OSError, RuntimeError) as error:
            report.once(
                f"deaths cannot be noted (MLX_SHIM_STATE_DIR, MLX_SHIM_CRASH_LOOP): {error!r}"
            )
        except Exception as error:
            report.once(f"crash_loop failed: {error!r}")
        return None

    def begin(self) -> tuple[float, State]:
        """Judge the runs before this one, and note that it lives. Seconds it has to wait, and what is remembered."""
        file = self._make()
        try:
            last = file.read()
        except state_file.Corrupt as why:
            report.line(f"{file.path} is not a state file of the shim, {why}: put aside")
            file.put_aside()
            last = State()
        self._file = file
        now, limit = self._now(), settings.current.breaker
        state = without_old_deaths(last, limit, now)
        left = backoff.seconds(state.deaths, limit) if limit and not state.served else 0.0
        left = min(left, backoff.LONGEST / (1 + JITTER)) * random.uniform(1, 1 + JITTER)  # noqa: S311
        if (
            last.run is not None and last.run.phase == WAITING
        ):  # somebody ended it meanwhile: it does not begin anew
            left = min(left, max(0.0, last.run.until - now))
        self.state = replace(
            state, run=Run(WAITING if left or state.killed else LOADING, now, now + left)
        )
        self.save()
        return left, self.state

    def save(self) -> None:
        if self._file is not None:
            self._seen = time.monotonic()
            self._file.write(self.state)

    def note_loading(self) -> None:
        """The waits are over, for these deaths once and for all."""
        self.state = replace(self.state, served=True)
        self._note(LOADING)

    def note_up(self) -> None:
        """The model is up: what it takes is noted."""
        held = _footprint()
        self.state = replace(
            self.state,
            killed=False,
            footprint=held,
            model=held if engine.model_name != "none" else 0,
        )
        self._up_since = time.monotonic()
        self._note(UP)

    def _note(self, phase: str) -> None:
        if not engine.closing:  # else its end has been noted
            self.state = replace(self.state, run=Run(phase, self._now()))
            self.save()

    def look(self) -> None:
        """Called every TICK seconds."""
        self._framed(self._look)

    def _look(self) -> None:
        run = self.state.run
        if run is None:
            return
        limit = settings.current.breaker
        good = limit.window if limit else _GOOD_RUN
        if engine.closing:
            self.note_end(None)
        elif (
            self.state.deaths
            and self._up_since is not None
            and time.monotonic() - self._up_since > good
        ):
            self.state = replace(self.state, deaths=[])
            self.save()
        elif time.monotonic() - self._seen >= SEEN:
            self.state = replace(
                self.state, footprint=_footprint(), run=replace(run, seen=self._now())
            )
            self.save()

    def note_end(self, status: int | None) -> None:
        """Note the end: a death with its status, or None for one that was asked for."""
        run = self.state.run
        if run is not None and (
            status is not None or run.phase != WAITING
        ):  # the next start waits for what is left
            died = [] if status is None else [Death(self._now(), status)]
            deaths, served = [*self.state.deaths, *died], self.state.served and not died
            self.state = replace(self.state, deaths=deaths, served=served, killed=False, run=None)
            self.save()


def without_old_deaths(last: State, limit: Limit | None, now: float) -> State:
    """`last` as a start finds it: a run that never noted its end has died, unless it had only waited."""
    window = limit.window if limit else _GOOD_RUN
    deaths, run = last.deaths, last.run
    if run is not None and run.phase != WAITING:
        last = replace(last, killed=now - run.seen <= SEEN + LATELY, served=False)
        deaths = [*deaths, Death(run.seen, None)]
    return replace(last, deaths=backoff.recent(deaths, window, now))


def _footprint() -> int:
    try:
        return memory.footprint()
    except OSError:
        return 0
