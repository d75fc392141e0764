"""What the shim can see of a server: a list of facts, each watched by itself, so that a lost one costs that fact alone.

A guard says in LIVES_BY which facts it lives by. Its state is computed from those (`judge`), again whenever a fact is
lost: a wrapper may fail at run time, or turn out never to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import report

# What a guard says of a fact without which it cannot act at all.
NEEDED = ""

_UNWATCHED = "it is not watched"
# The keys are one fact, or several of which one is enough; the values say what cannot be told without it.
LivesBy = Mapping[str | tuple[str, ...], str]


@dataclass
class Fact:
    """One thing that can be seen of a server."""

    name: str
    sees: str
    # Each request that is served passes it: where it was not seen by then, its wrapper is in the wrong place.
    in_every_request: bool = False
    seen: bool = False
    was_unseen: bool = False  # it is lost for that reason, and may be seen yet
    lost: str | None = _UNWATCHED


def _table(*facts: Fact) -> dict[str, Fact]:
    return {fact.name: fact for fact in facts}


known = _table(
    Fact("starts", "a generator that is made, by the wrapper around ResponseGenerator.__init__"),
    Fact("loop", "what ends the generation loop, by the wrapper around it"),
    Fact("asked to stop", "that the generation loop was asked to end"),
    Fact("stops", "an orderly stop, by the wrapper around stop_and_join"),
    Fact("stop flag", "the flag by which the generation loop is asked to end"),
    Fact("boot", "the load of the model of --model"),
    Fact("loads", "the load of a model"),
    Fact("turns", "each turn of the generation loop"),
    Fact("handlers", "an HTTP thread that answers a request", in_every_request=True),
    Fact("answers", "the bytes of an answer", in_every_request=True),
    Fact("deliveries", "what the engine puts on the queue of a response", in_every_request=True),
    Fact("steps", "each step of the batch"),
    Fact("batch", "which request a sequence of the batch belongs to"),
    Fact("single", "that one request is served alone"),
    Fact("tokenizing", "that a text is turned into tokens, and how many", in_every_request=True),
)
on_loss: list[Callable[[], None]] = []


def watch(name: str, begin: Callable[[], None]) -> None:
    """Begin to watch a fact; where `begin` raises, that fact is lost, with the reason."""
    fact = known[name]
    try:
        begin()
    except Exception as error:
        fact.lost = report.one_line(error)
    else:
        fact.lost = None


def saw(name: str) -> None:
    """A fact was seen once more."""
    fact = known[name]
    fact.seen = True
    if fact.was_unseen:
        regain(name)


def lose(name: str, why: str) -> None:
    """A fact that was watched cannot be seen after all; what lives by it is judged anew."""
    fact = known[name]
    if fact.lost is None:
        fact.lost = why
        _judge_anew()


def regain(name: str) -> None:
    """A fact that was lost because it had not been seen is seen after all."""
    fact = known[name]
    if fact.was_unseen:
        fact.was_unseen, fact.lost = False, None
        _judge_anew()


def _judge_anew() -> None:
    for judge_anew in on_loss:
        judge_anew()


def has(name: str) -> bool:
    """Whether the fact is being watched, as far as is known."""
    return known[name].lost is None


def lose_unseen(why: str, also: Mapping[str, bool]) -> None:
    """After some requests were served: lose each fact that every one of them passes and that was not seen.

    `also` holds facts that are counted elsewhere, and whether they were not seen.
    """
    changed = False
    for fact in list(known.values()):
        unseen = also.get(fact.name, fact.in_every_request and not fact.seen)
        if unseen and fact.lost is None:
            fact.lost, fact.was_unseen, changed = why, True, True
        elif not unseen and fact.was_unseen:
            fact.lost, fact.was_unseen, changed = None, False, True
    if changed:
        _judge_anew()


def judge(lives_by: LivesBy) -> tuple[report.Kind, str]:
    """("active", ""), ("degraded", what it cannot see and then cannot tell), or ("incompatible", why it cannot act)."""
    costs = []
    for key, cost in lives_by.items():
        names = (key,) if isinstance(key, str) else key
        if any(has(name) for name in names):
            continue
        blind = " nor ".join(f"{name} ({known[name].lost})" for name in names)
        if cost == NEEDED:
            return "incompatible", f"cannot see {blind}"
        costs.append(f"cannot see {blind}: {cost}")
    return ("degraded", "; ".join(costs)) if costs else ("active", "")


def shown() -> dict[str, Any]:
    """Each fact that cannot be seen, and why; not those that nothing has asked for."""
    return {fact.name: fact.lost for fact in known.values() if fact.lost not in (None, _UNWATCHED)}
