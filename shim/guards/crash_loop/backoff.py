"""When a server that keeps dying has to wait before it loads its model again: arithmetic alone, no clock and no file."""

from __future__ import annotations

from typing import NamedTuple

from ...core.values import Limit

LONGEST = 600.0  # seconds of one wait, at most
KEPT = 128  # deaths that are remembered
_SLACK = 5.0  # seconds that a death may lie ahead of the clock: clocks are set


class Death(NamedTuple):
    """When, by the wall clock, and the status it ended with; None where it was killed, or ended without a word."""

    at: float
    status: int | None


def recent(deaths: list[Death], window: float, now: float) -> list[Death]:
    """The deaths that still count, oldest first: none once the last is older than `window`, none from the future."""
    past = sorted(
        (death for death in deaths if death.at <= now + _SLACK), key=lambda death: death.at
    )[-KEPT:]
    return past if past and now - past[-1].at <= window else []


def seconds(deaths: list[Death], limit: Limit) -> float:
    """How long the next start waits, given the deaths since the last long good run, oldest first; 0 is not at all."""
    for last in range(limit.deaths - 1, len(deaths)):
        if deaths[last].at - deaths[last - limit.deaths + 1].at <= limit.window:
            further = len(deaths) - 1 - last
            return min(LONGEST, limit.base * 2.0 ** min(further, 64))
    return 0.0


def reason(deaths: list[Death], limit: Limit) -> str:
    """Why it waits, in words."""
    status = deaths[-1].status
    how = "it was killed or crashed" if status is None else f"status {status}"
    return (
        f"{len(deaths)} deaths, {limit.deaths} of them within {limit.window:g} s (the last: {how})"
    )
