"""Computes how long a server that keeps dying waits before it loads its model again.

Arithmetic alone: no clock and no file.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.values import Limit

LONGEST_WAIT = 600.0  # seconds
# Deaths that are remembered.
MOST_DEATHS = 128
# Seconds that a death may lie in the future: clocks are corrected.
_CLOCK_SLACK = 5.0
# Doublings of the first wait, at most: more would overflow a float.
_MOST_DOUBLINGS = 64


class Death(NamedTuple):
    """When a run died, by the wall clock, and its status.

    The status is None where the run was killed, or ended without noting it.
    """

    at: float
    status: int | None


def recent(deaths: list[Death], window: float, now: float) -> list[Death]:
    """The deaths that still count, oldest first.

    A death in the future does not count. Once the last is older than `window` seconds, none does.
    """
    past = [death for death in deaths if death.at <= now + _CLOCK_SLACK]
    past = sorted(past, key=lambda death: death.at)[-MOST_DEATHS:]
    return past if past and now - past[-1].at <= window else []


def seconds(deaths: list[Death], limit: Limit) -> float:
    """Seconds that the next start waits; 0: it does not wait.

    `deaths` are those since the last long good run, oldest first.
    """
    for last in range(limit.deaths - 1, len(deaths)):
        if deaths[last].at - deaths[last - limit.deaths + 1].at <= limit.window:
            further = len(deaths) - 1 - last
            return min(LONGEST_WAIT, limit.base * 2.0 ** min(further, _MOST_DOUBLINGS))
    return 0.0


def reason(deaths: list[Death], limit: Limit) -> str:
    """Why it waits, in words."""
    status = deaths[-1].status
    how = "it was killed or crashed" if status is None else f"status {status}"
    within = f"{limit.deaths} of them within {limit.window:g} s"
    return f"{len(deaths)} deaths, {within} (the last: {how})"
