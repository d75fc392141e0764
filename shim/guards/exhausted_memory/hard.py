"""The hard limit: above it the guard refuses new requests, and ends the largest one by one."""

from __future__ import annotations

from typing import Any

from ...core import report
from ...core.errors import ShimError, memory_pressure
from ...core.memory import Usage, format_bytes
from ...engine.entries import FINISHED, QUEUED, Entry
from ...engine.state import engine
from ...models import weights
from . import limit
from .limit import Limit, Replacement, describe

# Seconds until the process is replaced while the end of a request waits for a step of the engine.
STEP_GRACE = 60.0


class HardLimit(Limit):
    setting = "memory_hard"

    def __init__(self, size: int, replacement: Replacement, mx: Any) -> None:
        super().__init__(size, replacement)
        self._mx = mx
        # Since when the memory is above hard, or since the guard last ended a request for it.
        self._since: float | None = None
        # The request that the guard ended last.
        self._ended: Entry | None = None

    def judge(self, usage: Usage, now: float) -> None:
        if not self.is_crossed(usage):
            if self._since is not None:
                report.line(f"memory: {describe(usage)}: below hard again")
            self._since = self._ended = None
            return
        hard = format_bytes(self.size)
        if self._since is None:
            self._since = now
            report.line(
                f"memory: {describe(usage)}, hard is {hard}: new requests are 503 until it is less"
            )
            engine.memory_error = engine.memory_error or memory_pressure()
            # The soft limit has just asked for a trim: the next look comes after it.
            return
        # Until the generation thread lets go of the request, its memory cannot be free.
        waiting = self._ended is not None and _is_held(self._ended)
        if self._ended is not None and not waiting:
            # Its memory may be in MLX's pool now. The soft limit has just asked for a trim.
            self._ended, self._since = None, now
            return
        victim = None if waiting else _largest()
        if victim is not None:
            self._end(victim, usage, now)
        elif now - self._since >= (STEP_GRACE if waiting else limit.GRACE):
            self._replacement.ask(f"memory: {describe(usage)}, still above hard, {hard}", usage)

    def _end(self, victim: Entry, usage: Usage, now: float) -> None:
        report.line(
            f"memory: still above hard, request {victim.id} ({victim.length} tokens) is ended"
        )
        self._ended, self._since = victim, now
        if victim.queue is not None:
            victim.queue.fail(self.verdict(victim, usage))
        engine.stop(victim)

    def verdict(self, victim: Entry, usage: Usage) -> ShimError:
        """The error for a request that is ended.

        A request that crosses hard by itself would cross it again: 400 tells the client not to
        come back.
        """
        # A queued request has taken nothing yet: another request or a load of a model has.
        if victim.phase == QUEUED or any(
            entry is not victim and entry.phase not in (QUEUED, FINISHED)
            for entry in engine.known()
        ):
            return memory_pressure()
        with report.contained("memory: what a request takes cannot be told"):
            if self._requests_alone_cross(usage):
                return ShimError(
                    400,
                    "context_length_exceeded",
                    f"there is not enough memory for the {victim.length} tokens of this request "
                    "by itself (MLX_SHIM_MEMORY_HARD)",
                )
        return memory_pressure()

    def _requests_alone_cross(self, usage: Usage) -> bool:
        """Whether memory is above hard without the prompt cache, and would not be without requests.

        Else the prompt cache is what is above, or memory that belongs to no request.
        """
        requests: int = usage.active + usage.pool - weights.size(engine.provider, self._mx.array)
        without_cache: int = usage.counted - engine.prompt_cache.nbytes
        return without_cache >= self.size > usage.counted - requests


def _is_held(entry: Entry) -> bool:
    """Whether the generation thread still has the request."""
    return entry.phase != FINISHED and (entry.id in engine.entries or entry.id in engine.abandoned)


def _largest() -> Entry | None:
    """The longest request, the youngest of equals; None where none can be ended.

    In a batch every sequence takes as much as the longest: ending any other frees less.
    """
    if engine.serving_alone and engine.distributed:
        # Stock cannot end it: rank 0 would leave the work, and the other ranks would go on.
        return None
    able = [e for e in list(engine.entries.values()) if not e.stopped and e.phase != FINISHED]
    return max(able, key=lambda e: (e.length, e.id), default=None)
