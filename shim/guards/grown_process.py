"""A process that has served for long has grown, and nobody replaces it before the system does.

Here, where a limit of MLX_SHIM_RECYCLE_* is set and reached, the process ends with 75 once it is idle, or, at twice the
limit, after a drain; its supervisor starts a fresh one. Each process has its limits up to a tenth higher, drawn at its
start: several do not end together. What it had grown is said, so that one can judge whether this was needed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core import memory, patch, report, settings
from ..core.memory import footprint, format_bytes
from ..core.verdicts import require
from ..engine import drain, facts, fatal, watchdog
from ..engine.state import engine

UPSTREAM = "mlx-lm 854, 1480, 1845 and others, each a way to grow"
MODULE = "mlx_lm.server"
SETTINGS = ("recycle_requests", "recycle_tokens", "recycle_age", "recycle_memory")
LIVES_BY = {
    "turns": facts.NEEDED,
    "deliveries": "requests and tokens are not counted, nor seen to be in flight",
}

EVERY = 1.0  # seconds between two looks
JITTER = 0.1
TWICE = 2  # times the limit: it no longer waits for an idle moment


def probe(server: Any) -> None:
    require(
        server, "ResponseGenerator._next_request", "mx.get_active_memory", "mx.get_cache_memory", "mx.clear_cache",
    )  # fmt: skip


def apply(server: Any) -> None:
    limits = drawn(settings.current, random.uniform(1, 1 + JITTER))  # noqa: S311
    recycling = _Recycling(server.mx, limits)
    drain.install(server)
    watchdog.add(recycling)
    patch.wrap(server, "ResponseGenerator._next_request", recycling.next_request)


@dataclass(frozen=True)
class Limit:
    """One of the settings, as drawn for this process."""

    setting: str
    value: float
    read: Callable[[], float]
    show: Callable[[float], str]


def drawn(current: settings.Settings, factor: float) -> list[Limit]:
    """The limits that are set, each times `factor`."""
    known = (
        ("recycle_requests", lambda: engine.counters["requests"], lambda n: f"{n:.0f} requests"),
        ("recycle_tokens", _tokens, lambda n: f"{n:.0f} tokens"),
        ("recycle_age", lambda: engine.age, lambda n: f"{n:.0f} s of age"),
        ("recycle_memory", footprint, lambda n: f"a footprint of {format_bytes(n)}"),
    )
    return [
        Limit(settings.variable(name), getattr(current, name) * factor, read, show)
        for name, read, show in known
        if getattr(current, name)
    ]


def _tokens() -> int:
    return engine.closed_tokens + sum(
        entry.processed + entry.tokens for entry in list(engine.entries.values())
    )


class _Recycling:
    """Called by the watchdog; looks once a second."""

    def __init__(self, mx: Any, limits: list[Limit]) -> None:
        self._mx = mx
        self._limits = limits
        self._looked = 0.0
        self._begun = False
        self._at_start = 0  # the footprint with the model up

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked < EVERY or not self._begun or engine.closing or engine.rank:
            return
        self._looked = now
        try:
            self._look()
        except OSError as error:  # as without a file descriptor left: the next look may tell
            report.once(f"recycling: the footprint cannot be read: {error!r}")

    def _look(self) -> None:
        for limit in self._limits:
            figure = limit.read()
            if figure >= limit.value and (_is_idle() or figure >= TWICE * limit.value):
                self._recycle(limit, figure)
                return

    def next_request(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """In the generation loop, first with the model up and nothing in the batch: later a burst would be taken for it."""
        if not self._begun:
            try:
                self._begin()
            except Exception as error:  # here it would be a death
                report.line(f"recycling: the footprint cannot be read: {error!r}")
            self._begun = True
        return wrapped(*args, **kwargs)

    def _begin(self) -> None:
        self._at_start = memory.at_rest(self._mx).footprint
        for limit in list(self._limits):
            if limit.read is footprint and self._at_start >= limit.value:
                self._limits.remove(
                    limit
                )  # else it would be started again and again, and never serve
                report.line(
                    f"{limit.setting} is left out: with its model up the process has {limit.show(self._at_start)} already"
                )

    def _recycle(self, limit: Limit, figure: float) -> None:
        before, after = self._at_start, _held()
        why = (
            f"recycled at {limit.show(figure)}, {limit.setting} being {limit.show(limit.value)} in this process; "
            f"its footprint was {format_bytes(before)} with the model up and is {format_bytes(after) if after else 'not known'}"
        )
        grown = {"footprint_model_up": before, "footprint": after, "limit": limit.setting}
        facts = (fatal.gather_facts(why) or {}) | {
            "recycled": grown | {"value": limit.value, "figure": figure}
        }
        drain.ask(drain.Order(why, fatal.EX_TEMPFAIL, facts))


def _held() -> int | None:
    try:
        return footprint()
    except OSError:  # as without a file descriptor left, which is a reason to be recycled
        return None


def _is_idle() -> bool:
    return not (engine.in_flight or engine.entries or engine.abandoned or engine.loading)
