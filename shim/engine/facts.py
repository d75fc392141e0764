"""The facts that the shim can see of a server. It watches each by itself, so it can lose one alone.

A guard's LIVES_BY names the facts that it needs. `judge` computes its state from them, and again
whenever a fact is lost: a wrapper may fail at run time, or turn out never to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import report

# The value, in LIVES_BY, of a fact without which the guard cannot act at all.
NEEDED = ""

_UNWATCHED = "it is not watched"
# The type of LIVES_BY. A key is one fact, or several of which one is enough. The value says what
# the guard cannot tell without it.
LivesBy = Mapping[str | tuple[str, ...], str]


@dataclass
class Fact:
    """One thing that can be seen of a server."""

    name: str
    sees: str
    # Whether every request that is served shows it. If one was served and the fact was not seen,
    # its wrapper is in the wrong place.
    in_every_request: bool = False
    seen: bool = False
    # Whether it is lost for that reason. It may still be seen later.
    was_unseen: bool = False
    # Why it is lost; None while it is watched.
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
# Called whenever a fact is lost or regained.
on_loss: list[Callable[[], None]] = []


def watch(name: str, begin: Callable[[], None]) -> None:
    """Begin to watch a fact. If `begin` raises, the fact is lost, with the reason."""
    fact = known[name]
    try:
        begin()
    except Exception as error:
        fact.lost = report.one_line(error)
    else:
        fact.lost = None


def saw(name: str) -> None:
    """Note that a fact was seen."""
    fact = known[name]
    fact.seen = True
    if fact.was_unseen:
        regain(name)


def lose(name: str, why: str) -> None:
    """Note that a watched fact cannot be seen after all, and judge the guards again."""
    fact = known[name]
    if fact.lost is None:
        fact.lost = why
        _judge_again()


def regain(name: str) -> None:
    """Note that a fact which was lost because it was not seen is seen after all."""
    fact = known[name]
    if fact.was_unseen:
        fact.was_unseen, fact.lost = False, None
        _judge_again()


def _judge_again() -> None:
    for judge_again in on_loss:
        judge_again()


def has(name: str) -> bool:
    """Whether a fact is watched and not lost."""
    return known[name].lost is None


def lose_unseen(why: str, also: Mapping[str, bool]) -> None:
    """Lose each fact that every request shows and that was not seen. Regain those seen since.

    Call this after some requests were served. `also` holds facts that are counted elsewhere; its
    values say whether they are unseen.
    """
    changed = False
    for fact in list(known.values()):
        unseen = also.get(fact.name, fact.in_every_request and not fact.seen)
        if unseen and fact.lost is None:
            fact.lost, fact.was_unseen, changed = why, True, True
        elif not unseen and fact.was_unseen:
            fact.lost, fact.was_unseen, changed = None, False, True
    if changed:
        _judge_again()


def judge(lives_by: LivesBy) -> tuple[report.Kind, str]:
    """Compute a guard's state from its LIVES_BY: the kind and the reason.

    It is ("active", ""), ("degraded", what the guard cannot see and so cannot tell), or
    ("incompatible", why the guard cannot act).
    """
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
    """Return each fact that is lost, and why, without those that were never watched."""
    return {fact.name: fact.lost for fact in known.values() if fact.lost not in (None, _UNWATCHED)}
