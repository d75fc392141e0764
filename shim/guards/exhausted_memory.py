"""Memory is taken until there is none: macOS panics, or kills the server with everybody's requests.

Here, where MLX_SHIM_MEMORY_SOFT or _HARD is set, the watchdog looks once a second at what is in use, the larger of
MLX's count and the process's footprint. Above soft, what is free to go is trimmed: what MLX and malloc keep, then entries of
the prompt cache; if that is not enough new requests are 503 `memory_pressure`. Above hard the largest requests are
ended with that error, one after another; one that is above by itself gets 400. What stays above, with nobody left to free anything, is drained and replaced
(75).
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..core import memory, patch, report, settings
from ..core.errors import ShimError, memory_pressure
from ..core.memory import Usage, format_bytes
from ..core.verdicts import require
from ..engine import drain, facts, fatal, watchdog
from ..engine.entries import FINISHED, QUEUED, Entry
from ..engine.state import engine
from ..models import weights

UPSTREAM = "mlx-lm 854, 883, 1390, 1480, 1666; mlx 3186, 3346"
MODULE = "mlx_lm.server"
SETTINGS = ("memory_soft", "memory_hard")
LIVES_BY = {
    "turns": facts.NEEDED,
    "deliveries": "no request can be ended for its memory",
    "steps": "a trim waits for the next turn",
}

EVERY = 1.0  # seconds between two looks
MARGIN = 1.05  # times what the process has with its model up: a limit below that leaves nothing to serve with
RELEASE = 0.95  # of soft, below which new requests are let in again
GIVE_BACK = 5.0  # seconds after which malloc is asked again, in vain so far: with many holes in its heap it takes a millisecond
CALM = (
    60.0  # seconds below that after which an episode above soft is over: each trim ends right there
)
# Seconds until the process is replaced: above soft with nobody served, or above hard with nobody left to end; and above
# hard with one whose end waits for a step of the engine.
GRACE, STEP_GRACE = 10.0, 60.0


def probe(server: Any) -> None:
    require(
        server, "mx.get_active_memory", "mx.get_cache_memory", "mx.clear_cache", "ResponseGenerator._next_request",
        "APIHandler.handle_completion", "LRUPromptCache.trim_to", "BatchGenerator.next",
    )  # fmt: skip


def apply(server: Any) -> None:
    soft, hard = settings.current.memory_soft, settings.current.memory_hard
    if soft and hard and soft > hard:
        report.line(
            f"MLX_SHIM_MEMORY_SOFT, {format_bytes(soft)}, is above MLX_SHIM_MEMORY_HARD, {format_bytes(hard)}, and is held to that"
        )
    guard = _Guard(server.mx, min(soft or hard, hard or soft), hard)
    drain.install(server)
    watchdog.add(guard)
    patch.wrap(server, "ResponseGenerator._next_request", guard.next_request)
    patch.wrap(server, "BatchGenerator.next", guard.step)
    patch.wrap(server, "APIHandler.handle_completion", _handle_completion)


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if engine.memory_error is not None and engine.own is None:
        # One of its own: an error that is raised again and again holds each time's frames, and the requests in them.
        raise memory_pressure()
    return wrapped(*args, **kwargs)


class _Guard:
    """Judges in the watchdog's thread; trims in the generation thread, which is the only one that uses the caches."""

    def __init__(self, mx: Any, soft: int, hard: int) -> None:
        self._mx = mx
        self.soft, self.hard = soft, hard
        self._looked = self._gave_back = 0.0
        self._helped = False  # whether that was enough to be below soft
        self._begun = False
        self._above = False  # soft, when it last looked
        self._last_above: float | None = (
            None  # while an episode lasts, which is a line at its begin and one at its end
        )
        self._relieved = False  # whether a trim since then was enough
        self._excess = 0  # bytes the generation thread is asked to let go of
        self._hard_since: float | None = None  # or since the last request was ended for it
        self._ended: Entry | None = None  # the last of them
        self._stuck_since: float | None = None  # above soft, with nobody served
        self._replacing = False

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked < EVERY or not self._begun:
            return
        self._looked = now
        try:
            self._look(now)
        except OSError as error:  # as without a file descriptor left: the next look may tell
            report.once(f"memory: what is in use cannot be read: {error!r}")
        except Exception:
            engine.memory_error = (
                None  # the watchdog looks no more, and nobody else would take it back
            )
            raise

    def _look(self, now: float) -> None:
        usage = engine.memory = self._usage(now)
        self._judge_soft(usage, now)
        if self.hard and not engine.rank:  # whose requests they are is known to rank 0 alone
            self._judge_hard(usage, now)

    def _usage(self, now: float) -> Usage:
        usage = memory.usage(self._mx)
        if (
            not self.soft
            or usage.counted < self.soft
            or usage.footprint <= usage.active + usage.pool
        ):
            return usage
        # Malloc alone may be what keeps it. Where that was not so a moment ago, and nobody is to be ended, it can wait.
        if (
            self._helped
            or now - self._gave_back >= GIVE_BACK
            or (self.hard and usage.counted >= self.hard)
        ):
            self._gave_back = now
            memory.give_back()
            usage = memory.usage(self._mx)
            self._helped = usage.counted < self.soft
        return usage

    def _begin(self) -> None:
        """With its model up. A limit below that would turn everybody away, or have the process replaced for ever."""
        usage = memory.at_rest(
            self._mx
        )  # what a load leaves in the pool and in malloc is not needed to serve
        for name in ("soft", "hard"):
            limit = getattr(self, name)
            if limit and usage.counted * MARGIN >= limit:
                setattr(self, name, 0)
                engine.ignored_limits.add(f"memory_{name}")
                report.line(
                    f"{settings.variable('memory_' + name)}, {format_bytes(limit)}, is left out: with its model up the process "
                    f"has {format_bytes(usage.counted)} already"
                )
        self.soft = self.soft or self.hard

    def _judge_soft(self, usage: Usage, now: float) -> None:
        critical, short = memory.is_critical(), engine.memory_error is not None
        full = self.soft > 0 and usage.counted >= self.soft
        low = usage.counted < self.soft * RELEASE or not self.soft
        relieved, self._relieved = self._relieved, False
        limit = f"soft is {format_bytes(self.soft)}" if full else "macOS says critical"
        if full or critical or (short and not low):
            self._excess = max(1, usage.counted - int(self.soft * RELEASE)) if self.soft else 1
        self._tell_episode(usage, now, limit if full or critical else None, low=low)
        if (full or critical) and self._above and not relieved and not short:
            report.line(f"memory: {_told(usage)}, {limit}: new requests are 503 until it is less")
            engine.memory_error = memory_pressure()
        elif (
            short and not (full or critical) and (low or _is_idle())
        ):  # idle, nothing more is to be expected
            report.line(f"memory: {_told(usage)}: new requests are let in again")
            engine.memory_error = None
        self._above = full or critical
        above_hard = self.hard and usage.counted >= self.hard  # which is judged by itself
        stuck = full and short and _is_idle() and not above_hard
        self._stuck_since = (self._stuck_since or now) if stuck else None
        if self._stuck_since is not None and now - self._stuck_since >= GRACE:
            self._replace(
                f"memory: {_told(usage)} with nobody served, soft is {format_bytes(self.soft)}",
                usage,
            )

    def _tell_episode(self, usage: Usage, now: float, limit: str | None, *, low: bool) -> None:
        """A line where it begins, and one where it is over."""
        if limit is not None:
            if self._last_above is None:
                report.line(f"memory: {_told(usage)}, {limit}: what is free to go is trimmed")
            self._last_above = now
        elif self._last_above is not None and low and now - self._last_above >= CALM:
            report.line(f"memory: {_told(usage)}: below soft again")
            self._last_above = None

    def _judge_hard(self, usage: Usage, now: float) -> None:
        if usage.counted < self.hard:
            if self._hard_since is not None:
                report.line(f"memory: {_told(usage)}: below hard again")
            self._hard_since = self._ended = None
            return
        if self._hard_since is None:
            self._hard_since = now
            report.line(
                f"memory: {_told(usage)}, hard is {format_bytes(self.hard)}: new requests are 503 until it is less"
            )
            engine.memory_error = engine.memory_error or memory_pressure()
            return  # the next look is after a trim, for which the engine was asked just now
        waiting = self._ended is not None and self._is_held(
            self._ended
        )  # what it has cannot be free yet
        if (
            self._ended is not None and not waiting
        ):  # what it had may lie in MLX's pool: a trim was asked for just now
            self._ended, self._hard_since = None, now
            return
        victim = None if waiting else self._largest()
        if victim is not None:
            self._end(victim, usage, now)
        elif now - self._hard_since >= (STEP_GRACE if waiting else GRACE):
            self._replace(
                f"memory: {_told(usage)}, still above hard, {format_bytes(self.hard)}", usage
            )

    def _replace(self, why: str, usage: Usage) -> None:
        if not (self._replacing or engine.closing or engine.rank):
            self._replacing = True
            facts = (fatal.gathered(why) or {}) | {"memory": usage._asdict()}
            drain.ask(drain.Order(why, fatal.EX_TEMPFAIL, facts))

    def _end(self, victim: Entry, usage: Usage, now: float) -> None:
        report.line(
            f"memory: still above hard, request {victim.id} ({victim.length} tokens) is ended"
        )
        self._ended, self._hard_since = victim, now
        if victim.queue is not None:
            victim.queue.fail(self._verdict(victim, usage))
        engine.stop(victim)

    def _verdict(self, victim: Entry, usage: Usage) -> ShimError:
        """What it is told. One that crosses hard by itself would do so again: it is not told to come back."""
        if (
            victim.phase == QUEUED
        ):  # it has taken nothing yet: a model that is being loaded has, or somebody else
            return memory_pressure()
        if any(
            entry is not victim and entry.phase not in (QUEUED, FINISHED)
            for entry in engine.known()
        ):
            return memory_pressure()
        try:
            requests = usage.active + usage.pool - weights.size(engine.provider, self._mx.array)
            cached = engine.prompt_cache.nbytes
        except Exception as error:
            report.once(f"memory: what a request takes cannot be told: {error!r}")
            return memory_pressure()
        if usage.counted - cached < self.hard or usage.counted - requests >= self.hard:
            return (
                memory_pressure()
            )  # it is the prompt cache that is above, or what is no request's
        return ShimError(
            400, "context_length_exceeded",
            f"there is not enough memory for the {victim.length} tokens of this request by itself (MLX_SHIM_MEMORY_HARD)",
        )  # fmt: skip

    @staticmethod
    def _is_held(entry: Entry) -> bool:
        """Whether the generation thread still has it."""
        return entry.phase != FINISHED and (
            entry.id in engine.entries or entry.id in engine.abandoned
        )

    @staticmethod
    def _largest() -> Entry | None:
        """In a batch every sequence takes as much as the longest: no other frees as much. The youngest of equals."""
        if engine.serving_alone and engine.distributed:
            return None  # stock has no end for it: rank 0 would leave the work that the others go on with
        able = [e for e in list(engine.entries.values()) if not e.stopped and e.phase != FINISHED]
        return max(able, key=lambda e: (e.length, e.id), default=None)

    def next_request(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Once a turn of the generation loop, first with the model up and nothing in the batch."""
        if self._excess or not self._begun:
            self._act()
        return wrapped(*args, **kwargs)

    def step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Once a step of a batch: one that is drained for another model asks for no request until it is empty."""
        if self._excess and self._begun and threading.current_thread() is engine.generation_thread:
            self._act()
        return wrapped(*args, **kwargs)

    def _act(self) -> None:
        excess, self._excess = self._excess, 0
        try:
            if self._begun:
                self._trim(excess)
            else:
                self._begin()
                self._begun = True
        except Exception as error:  # here it would be a death
            self._begun = True
            report.once(f"memory: {error!r}")

    def _trim(self, excess: int) -> None:
        """First what nobody has any use for, then entries of the prompt cache, as many as it takes."""
        before, after, held = memory.usage(self._mx), memory.at_rest(self._mx), 0
        left = excess - (before.counted - after.counted)
        if left > 0 and not engine.distributed:  # the prompt caches of ranks have to be the same
            entries = engine.prompt_cache
            held = entries.nbytes
            entries.trim_to(n_bytes=held - left)
            held -= entries.nbytes
            after = memory.at_rest(self._mx)
        self._relieved = after.counted < self.soft and not memory.is_critical()
        report.debug(
            f"memory: {format_bytes(before.counted)} before and {format_bytes(after.counted)} after a trim, {format_bytes(held)} of entries"
        )


def _is_idle() -> bool:
    return not (engine.entries or engine.abandoned)


def _told(usage: Usage) -> str:
    pool = f" and {format_bytes(usage.pool)} of pool" if usage.pool else ""
    return f"{format_bytes(usage.counted)} in use (MLX {format_bytes(usage.active)}{pool}, footprint {format_bytes(usage.footprint)})"
