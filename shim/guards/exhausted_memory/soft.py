"""The soft limit: above it the guard asks for a trim, and then refuses new requests."""

from __future__ import annotations

from ...core import memory, report
from ...core.errors import memory_pressure
from ...core.memory import Usage, format_bytes
from ...engine.state import engine
from . import limit
from .limit import Limit, Replacement, describe
from .trim import Trimmer

# The share of soft to which a trim goes down. Below it new requests are accepted again.
RELEASE_SHARE = 0.95
# Seconds below that share after which an episode above soft is over. Each trim ends just there, so
# one look below it says little.
CALM = 60.0


class SoftLimit(Limit):
    setting = "memory_soft"

    def __init__(self, size: int, replacement: Replacement, trimmer: Trimmer) -> None:
        super().__init__(size, replacement)
        self._trimmer = trimmer
        # At the last look: above soft, or macOS said critical.
        self._was_pressed = False
        # When the memory was last above soft, while an episode lasts. An episode is one line at its
        # begin and one at its end.
        self._last_pressed: float | None = None
        # Since when the memory is above soft with no request being served.
        self._stuck_since: float | None = None

    def judge(self, usage: Usage, now: float, *, above_hard: bool) -> None:
        critical, refusing = memory.is_critical(), engine.memory_error is not None
        above = self.is_crossed(usage)
        pressed = above or critical
        low = usage.counted < self.size * RELEASE_SHARE or not self.size
        relieved = self._trimmer.take_relief()
        why = f"soft is {format_bytes(self.size)}" if above else "macOS says critical"
        if pressed or (refusing and not low):
            self._trimmer.excess = self._excess(usage)
        self._tell_episode(usage, now, why if pressed else None, low=low)
        if pressed and self._was_pressed and not relieved and not refusing:
            report.line(f"memory: {describe(usage)}, {why}: new requests are 503 until it is less")
            engine.memory_error = memory_pressure()
        # Without a request there is nothing left that could free more.
        elif refusing and not pressed and (low or not engine.known()):
            report.line(f"memory: {describe(usage)}: new requests are accepted again")
            engine.memory_error = None
        self._was_pressed = pressed
        # The hard limit judges for itself what is above hard.
        self._judge_stuck(usage, now, stuck=above and refusing and not above_hard)

    def _excess(self, usage: Usage) -> int:
        """Bytes that a trim is asked to free; 1 where only macOS says that memory is short."""
        return max(1, usage.counted - int(self.size * RELEASE_SHARE)) if self.size else 1

    def _judge_stuck(self, usage: Usage, now: float, *, stuck: bool) -> None:
        """Have a process replaced that refuses every request and has none left to serve."""
        if not stuck or engine.known():
            self._stuck_since = None
            return
        self._stuck_since = self._stuck_since or now
        if now - self._stuck_since >= limit.GRACE:
            soft = format_bytes(self.size)
            why = f"memory: {describe(usage)} with no request being served, soft is {soft}"
            self._replacement.ask(why, usage)

    def _tell_episode(self, usage: Usage, now: float, why: str | None, *, low: bool) -> None:
        """Write one line where an episode begins, and one where it is over."""
        if why is not None:
            if self._last_pressed is None:
                report.line(f"memory: {describe(usage)}, {why}: the caches are trimmed")
            self._last_pressed = now
        elif self._last_pressed is not None and low and now - self._last_pressed >= CALM:
            report.line(f"memory: {describe(usage)}: below soft again")
            self._last_pressed = None
