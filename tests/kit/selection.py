"""Which tests run, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kit.harness import NEWEST
from kit.releases import RELEASES

KINDS = ("guard", "control")


def is_process(item: Any) -> bool:
    """Whether the test starts servers."""
    return bool(item.path.parent.name == "process")


def shows(item: Any) -> set[tuple[str, str]]:
    """What the marks of a test say: (kind, guard)."""
    return {(kind, guard) for kind in KINDS for m in item.iter_markers(kind) for guard in m.args}


def of_guards(items: Iterable[Any], guards: set[str]) -> list[Any]:
    """The tests that show one of these guards, or are a control of one."""
    return [item for item in items if any(guard in guards for _, guard in shows(item))]


def is_of_an_older_release(item: Any) -> bool:
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, str) and value in RELEASES and value != NEWEST for value in params)


def quick(items: Iterable[Any]) -> list[Any]:
    """The tests for daily work: the unit tests, and a test and a control of each guard.

    They run on the newest line. Tests marked `slow` are left out, and so are guards that only older
    releases need.
    """
    items = [item for item in items if not is_of_an_older_release(item)]
    candidates = [
        item for item in items if is_process(item) and not item.get_closest_marker("slow")
    ]
    chosen, missing = set(), set().union(*map(shows, candidates))
    while missing:
        best = max(candidates, key=lambda item: len(shows(item) & missing))
        chosen.add(best)
        missing -= shows(best)
    return [item for item in items if not is_process(item) or item in chosen]


def order(items: list[Any]) -> list[Any]:
    """The slow tests first, so that no worker ends with one of them alone.

    Tests that always compute are mixed among those that mostly wait, to keep all cores busy.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    busy = [item for item in items if item.path.stem == "test_hybrid_families"]
    first = {*slow, *busy}
    others = [item for item in items if item not in first]
    # The tests that start servers come first.
    started = sum(map(is_process, others))
    step = max(1, started // (len(busy) + 1))
    for n, item in enumerate(busy):
        others.insert(n * (step + 1), item)
    return slow + others
