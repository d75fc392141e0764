"""A process that has served for long has grown, and it stays until the system ends it.

Here MLX_SHIM_RECYCLE_* set limits. A process that reaches one ends with 75 as soon as it is idle;
at twice the limit it drains and ends. Its supervisor starts a fresh process. Each process raises
its limits by up to a tenth, drawn at its start, so that several processes do not end together.
The process says how much it has grown, which shows whether the limit was needed.
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

LOOK_INTERVAL = 1.0  # seconds
# The share of a limit by which it is raised at most, so that processes do not end together.
JITTER = 0.1
# At this many times a limit the process no longer waits until it is idle.
OVERDUE = 2


def probe(server: Any) -> None:
    require(
        server,
        "ResponseGenerator._next_request",
        "mx.get_active_memory",
        "mx.get_cache_memory",
        "mx.clear_cache",
    )


def apply(server: Any) -> None:
    limits = drawn(settings.current, random.uniform(1, 1 + JITTER))  # noqa: S311
    recycling = _Recycling(server.mx, limits)
    drain.install(server)
    watchdog.add(recycling)
    patch.wrap(server, "ResponseGenerator._next_request", recycling.next_request)


@dataclass(frozen=True)
class Limit:
    """One of the settings, with the value drawn for this process."""

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
        # Whether the footprint with the model loaded is known.
        self._begun = False
        # That footprint, in bytes.
        self._at_start = 0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL or not self._begun or engine.closing or engine.rank:
            return
        self._looked = now
        try:
            self._look()
        # No free file descriptor, for example: the next look may work.
        except OSError as error:
            report.once(f"recycling: the footprint cannot be read: {error!r}")

    def _look(self) -> None:
        for limit in self._limits:
            figure = limit.read()
            if figure >= limit.value and (_is_idle() or figure >= OVERDUE * limit.value):
                self._recycle(limit, figure)
                return

    def next_request(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Read the footprint in the first turn of the generation loop: no request is in it yet."""
        if not self._begun:
            with report.contained("recycling: the footprint cannot be read", tell=report.line):
                self._begin()
            self._begun = True
        return wrapped(*args, **kwargs)

    def _begin(self) -> None:
        self._at_start = memory.at_rest(self._mx).footprint
        for limit in list(self._limits):
            if limit.read is footprint and self._at_start >= limit.value:
                # Else the process would be replaced again and again, and never serve.
                self._limits.remove(limit)
                report.line(
                    f"{limit.setting} is ignored: with its model loaded the process already has "
                    f"{limit.show(self._at_start)}"
                )

    def _recycle(self, limit: Limit, figure: float) -> None:
        before, after = self._at_start, _held()
        now = format_bytes(after) if after else "not known"
        why = (
            f"recycled at {limit.show(figure)}, {limit.setting} being {limit.show(limit.value)} "
            f"in this process; its footprint was {format_bytes(before)} with the model up and is "
            f"{now}"
        )
        grown = {"footprint_model_up": before, "footprint": after, "limit": limit.setting}
        facts = (fatal.gather_facts(why) or {}) | {
            "recycled": grown | {"value": limit.value, "figure": figure}
        }
        drain.ask(drain.Order(why, fatal.EX_TEMPFAIL, facts))


def _held() -> int | None:
    try:
        return footprint()
    # No free file descriptor, for example: one more reason to be replaced.
    except OSError:
        return None


def _is_idle() -> bool:
    return not (engine.in_flight or engine.entries or engine.abandoned or engine.loading)
