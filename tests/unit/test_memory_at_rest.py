"""Which memory the guard counts as the server's own, and what a refused request still holds."""

from __future__ import annotations

import gc
import types
import weakref

import pytest

from shim.core import memory
from shim.core.errors import ShimError, memory_pressure
from shim.core.memory import Usage
from shim.guards import exhausted_memory

MIB = 2**20


def test_what_a_load_left_is_given_back_before_the_limits_are_judged(engine, monkeypatch):
    """Otherwise a limit would be left out although there is room below it."""
    monkeypatch.setattr(exhausted_memory, "engine", engine)
    used = [Usage(100 * MIB, 700 * MIB, 900 * MIB)]
    mx = types.SimpleNamespace(
        clear_cache=lambda: used.append(Usage(100 * MIB, 0, used[-1].footprint))
    )
    monkeypatch.setattr(
        memory, "give_back", lambda: used.append(Usage(100 * MIB, used[-1].pool, 140 * MIB))
    )
    monkeypatch.setattr(memory, "usage", lambda mx: used[-1])
    made = exhausted_memory._Guard(mx, 800 * MIB, 1000 * MIB)
    made.next_request(lambda: None, None, (), {})
    assert made.soft.size == 800 * MIB


def test_an_answer_503_holds_nothing_of_the_request(engine, monkeypatch):
    monkeypatch.setattr(exhausted_memory, "engine", engine)
    engine.memory_error = memory_pressure()

    class Request:
        pass

    refused = []
    for _ in range(3):
        request = Request()
        refused.append(weakref.ref(request))
        with pytest.raises(ShimError):
            exhausted_memory._handle_completion(lambda _: None, None, (request,), {})
    del request
    gc.collect()
    assert [gone() for gone in refused] == [None] * 3
