"""The journal of this run and earlier ones. Its own thread keeps it in the state file."""

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

# Seconds between two looks at the run.
LOOK_INTERVAL = 1.0
# Seconds between two notes that the run lives, and of its footprint.
NOTE_INTERVAL = 60.0
# Seconds after which a dead process has given its memory back, or never will.
LATELY = 120.0
# The share by which a wait is prolonged at most, so that servers that died together do not load
# their models together.
JITTER = 0.1
# Seconds of a run that clears the deaths, where no breaker is set.
_GOOD_RUN = 600.0


class Journal:
    """Notes of this run and earlier ones. All methods but `post` run in the keeper's thread."""

    def __init__(self, make: Callable[[], StateFile], now: Callable[[], float] = time.time) -> None:
        self._make = make
        self._now = now
        self._file: StateFile | None = None
        self._up_since: float | None = None
        self._seen = 0.0
        self._keeper = state_file.Keeper(self.look, LOOK_INTERVAL)
        # Whether the folder once did not answer in time: it is not waited for again.
        self._late = False
        self.state = State()

    def post(self, job: Callable[[], Any], limit: float = 0) -> Any:
        """Have `job` done, and return its result if it is done within `limit` seconds.

        Returns None where it is not, where the job fails, and with a limit of 0. Reports a failure.
        """
        outcome = self._keeper.post(lambda: self._framed(job))
        try:
            return outcome.result(limit) if limit and not self._late else None
        # Not the builtin TimeoutError on Python 3.10.
        except futures.TimeoutError:
            self._late = True
            report.line(
                f"the folder of MLX_SHIM_STATE_DIR has not answered for {limit:g} s: "
                "it is not waited for"
            )
            return None

    def _framed(self, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except state_file.Held:
            report.once(
                "another process serves this model at this host and port: "
                "only that process notes deaths"
            )
        except (OSError, RuntimeError) as error:
            report.once(
                f"deaths cannot be noted (MLX_SHIM_STATE_DIR, MLX_SHIM_CRASH_LOOP): {error!r}"
            )
        except Exception as error:
            report.once(f"crash_loop failed: {error!r}")
        return None

    def begin(self) -> tuple[float, State]:
        """Judge the earlier runs, and note that this one lives.

        Returns the seconds that it has to wait, and what is remembered.
        """
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
        longest = backoff.LONGEST_WAIT / (1 + JITTER)
        left = min(left, longest) * random.uniform(1, 1 + JITTER)  # noqa: S311
        # A run that was ended during its wait: this one waits only for the rest.
        if last.run is not None and last.run.phase == WAITING:
            left = min(left, max(0.0, last.run.until - now))
        phase = WAITING if left or state.killed else LOADING
        self.state = replace(state, run=Run(phase, now, now + left))
        self.save()
        return left, self.state

    def save(self) -> None:
        if self._file is not None:
            self._seen = time.monotonic()
            self._file.write(self.state)

    def note_loading(self) -> None:
        """Note that the waits are over: no later start waits for these deaths."""
        self.state = replace(self.state, served=True)
        self._note(LOADING)

    def note_up(self) -> None:
        """Note that the model is loaded, and what it takes."""
        held = _footprint()
        model = held if engine.model_name != "none" else 0
        self.state = replace(self.state, killed=False, footprint=held, model=model)
        self._up_since = time.monotonic()
        self._note(UP)

    def _note(self, phase: str) -> None:
        # Else its end was noted.
        if not engine.closing:
            self.state = replace(self.state, run=Run(phase, self._now()))
            self.save()

    def look(self) -> None:
        """Called every LOOK_INTERVAL seconds."""
        self._framed(self._look)

    def _look(self) -> None:
        run = self.state.run
        if run is None:
            return
        limit = settings.current.breaker
        good_run = limit.window if limit else _GOOD_RUN
        now, up_since = time.monotonic(), self._up_since
        if engine.closing:
            self.note_end(None)
        elif self.state.deaths and up_since is not None and now - up_since > good_run:
            self.state = replace(self.state, deaths=[])
            self.save()
        elif now - self._seen >= NOTE_INTERVAL:
            seen = replace(run, seen=self._now())
            self.state = replace(self.state, footprint=_footprint(), run=seen)
            self.save()

    def note_end(self, status: int | None) -> None:
        """Note the end: a death by its status, None for an end that was asked for."""
        run = self.state.run
        # A run that was stopped during its wait stays noted: the next start waits for the rest.
        if run is not None and (status is not None or run.phase != WAITING):
            died = [] if status is None else [Death(self._now(), status)]
            deaths, served = [*self.state.deaths, *died], self.state.served and not died
            self.state = replace(self.state, deaths=deaths, served=served, killed=False, run=None)
            self.save()


def without_old_deaths(last: State, limit: Limit | None, now: float) -> State:
    """`last` without the deaths that no longer count.

    A run that never noted its end counts as a death, unless it had only waited.
    """
    window = limit.window if limit else _GOOD_RUN
    deaths, run = last.deaths, last.run
    if run is not None and run.phase != WAITING:
        last = replace(last, killed=now - run.seen <= NOTE_INTERVAL + LATELY, served=False)
        deaths = [*deaths, Death(run.seen, None)]
    return replace(last, deaths=backoff.recent(deaths, window, now))


def _footprint() -> int:
    try:
        return memory.footprint()
    except OSError:
        return 0
