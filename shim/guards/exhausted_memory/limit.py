"""What the soft and the hard limit share: a setting, a size, and the way to replace the process."""

from __future__ import annotations

from ...core.memory import Usage, format_bytes
from ...engine import drain, fatal
from ...engine.state import engine

# Seconds above a limit, with no request left that could free memory, until the process is replaced.
GRACE = 10.0


class Limit:
    """A limit: `size` in bytes, 0 where there is none."""

    setting: str

    def __init__(self, size: int, replacement: Replacement) -> None:
        self.size = size
        self._replacement = replacement

    def is_crossed(self, usage: Usage) -> bool:
        return 0 < self.size <= usage.counted


class Replacement:
    """Has the process drained and ended with 75, once."""

    def __init__(self) -> None:
        self._asked_for = False

    def ask(self, why: str, usage: Usage) -> None:
        if not (self._asked_for or engine.closing or engine.rank):
            self._asked_for = True
            facts = (fatal.gather_facts(why) or {}) | {"memory": usage._asdict()}
            drain.ask(drain.Order(why, fatal.EX_TEMPFAIL, facts))


def describe(usage: Usage) -> str:
    """What is in use, as the lines on stderr say it."""
    pool = f" and {format_bytes(usage.pool)} of pool" if usage.pool else ""
    return (
        f"{format_bytes(usage.counted)} in use (MLX {format_bytes(usage.active)}{pool}, "
        f"footprint {format_bytes(usage.footprint)})"
    )
