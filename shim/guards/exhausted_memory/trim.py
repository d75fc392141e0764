"""Measures the memory in use, and frees what no request uses."""

from __future__ import annotations

from typing import Any

from ...core import memory, report
from ...core.memory import Usage, format_bytes
from ...engine.state import engine
from .limit import Limit

# Seconds until malloc is asked again after it gave back too little. It takes about a millisecond
# where the heap has many holes.
GIVE_BACK_INTERVAL = 5.0


class Trimmer:
    """The watchdog's thread measures and asks for a trim; the generation thread trims."""

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        # Bytes that the generation thread is asked to free.
        self.excess = 0
        # Whether a trim since the last look was enough.
        self._relieved = False
        # When malloc was last asked to give memory back, and whether memory was below soft then.
        self._gave_back_at = 0.0
        self._giving_back_helped = False

    def measure(self, now: float, soft: Limit, hard: Limit) -> Usage:
        """What is in use, after malloc gave back what it keeps where only that is above soft."""
        usage = memory.usage(self._mx)
        if not soft.is_crossed(usage) or usage.footprint <= usage.active + usage.pool:
            return usage
        # The excess may be memory that malloc keeps. Asking malloc can wait where it has just not
        # helped, and no request would be ended.
        due = self._giving_back_helped or now - self._gave_back_at >= GIVE_BACK_INTERVAL
        if due or hard.is_crossed(usage):
            self._gave_back_at = now
            memory.give_back()
            usage = memory.usage(self._mx)
            self._giving_back_helped = usage.counted < soft.size
        return usage

    def take_relief(self) -> bool:
        """Whether a trim since the last call was enough."""
        relieved, self._relieved = self._relieved, False
        return relieved

    def trim(self, excess: int, soft: Limit) -> None:
        """Free what MLX and malloc keep, then as many entries of the prompt cache as it takes."""
        before, after, freed = memory.usage(self._mx), memory.at_rest(self._mx), 0
        left = excess - (before.counted - after.counted)
        # The prompt caches of all ranks have to stay the same: there it is not trimmed.
        if left > 0 and not engine.distributed:
            entries = engine.prompt_cache
            held = entries.nbytes
            entries.trim_to(n_bytes=held - left)
            freed = held - entries.nbytes
            after = memory.at_rest(self._mx)
        self._relieved = after.counted < soft.size and not memory.is_critical()
        report.debug(
            f"memory: {format_bytes(before.counted)} before and {format_bytes(after.counted)} "
            f"after a trim, {format_bytes(freed)} of entries"
        )
