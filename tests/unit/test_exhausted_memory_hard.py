"""Above hard: which request is ended, what its client is told, when the process is replaced."""

from __future__ import annotations

import types

import pytest

from kit.pressed import MIB, Entries, running, victims
from shim.core.memory import Usage
from shim.engine import fatal
from shim.engine.entries import DECODE, PREFILL, QUEUED
from shim.guards.exhausted_memory import hard, limit


def test_above_hard_the_largest_goes_then_the_next_once_the_first_is_let_go(
    guard, engine, request_
):
    small, _ = running(request_, 10)
    large, queue = running(request_, 500)
    young, _ = running(request_, 10)
    it = guard()
    it.look(1001)
    assert victims(engine) == [], "trimming may be enough"
    assert it.guard.trimmer.excess
    assert engine.memory_error is not None, "nobody new meanwhile"
    it.look(1001)
    assert victims(engine) == [large.id]
    assert queue.get_nowait().code == "memory_pressure"
    it.look(1001)
    assert victims(engine) == [large.id], "its memory cannot be free yet"
    engine.close(large)
    it.look(1001)
    assert victims(engine) == [], "the engine computes it until it lets go of it"
    engine.let_go(large)
    it.look(1001)
    assert victims(engine) == [], "what it had may lie in MLX's pool"
    assert it.guard.trimmer.excess
    it.look(1001)
    assert victims(engine) == [young.id], "the youngest of equals"
    engine.close(young)
    engine.let_go(young)
    it.look(700)
    assert not small.stopped
    assert it.orders == []
    assert [line.split(", ")[1] for line in it.lines if "ended" in line] == [
        f"request {large.id} (500 tokens) is ended",
        f"request {young.id} (10 tokens) is ended",
    ]


@pytest.mark.parametrize(
    ("beside", "cached", "active", "alone"),
    [
        (None, 0, 900, True),
        # Something else has the memory.
        (None, 0, 200, False),
        # Without the prompt cache it would fit.
        (None, 300, 900, False),
        (DECODE, 0, 900, False),
        (PREFILL, 0, 900, False),
        (QUEUED, 0, 900, True),
    ],
)
def test_who_is_above_hard_by_itself(  # noqa: PLR0917
    guard, engine, request_, beside, cached, active, alone
):
    """It would cross hard each time, so its client is not told to try again."""
    if beside:
        other, _ = request_()
        other.phase = beside
    entry, _ = running(request_, 500)
    model = types.SimpleNamespace(parameters=lambda: {"w": Entries(100 * MIB)})
    engine.generator = types.SimpleNamespace(
        prompt_cache=Entries(cached * MIB), model_provider=types.SimpleNamespace(model=model)
    )
    it = guard()
    it.guard._mx.array = Entries
    error = it.guard.hard.verdict(entry, Usage(active * MIB, 0, 1100 * MIB))
    assert (error.status, error.code) == (
        (400, "context_length_exceeded") if alone else (503, "memory_pressure")
    )


def test_one_whose_model_is_being_loaded_is_told_to_come_back(guard, engine, request_):
    """Stock has no model while it loads one: all memory in use would count as the request's."""
    entry, _ = request_()
    engine.generator = types.SimpleNamespace(
        prompt_cache=Entries(0), model_provider=types.SimpleNamespace(model=None)
    )
    it = guard()
    it.guard._mx.array = Entries
    error = it.guard.hard.verdict(entry, Usage(900 * MIB, 0, 1100 * MIB))
    assert (error.status, error.code) == (503, "memory_pressure")


def test_above_hard_with_nobody_to_end_it_is_replaced_once(guard):
    it = guard()
    it.look(1001)
    it.look(1001, limit.GRACE - 2)
    assert it.orders == []
    it.look(1001, 3)
    it.look(1001, 3)
    assert [order.status for order in it.orders] == [fatal.EX_TEMPFAIL]
    assert "still above hard, 1000.0 MiB" in it.orders[0].why


def test_one_that_several_machines_serve_alone_is_not_ended(guard, engine, request_):
    running(request_, 10)
    engine.generator, engine.serving_alone = types.SimpleNamespace(_is_distributed=True), True
    it = guard()
    it.look(1001)
    it.look(1001)
    assert victims(engine) == []
    it.look(1001, limit.GRACE)
    assert len(it.orders) == 1


def test_a_long_step_is_given_longer(guard, engine, request_):
    running(request_, 10)
    it = guard()
    it.look(1001)
    it.look(1001)
    it.look(1001, hard.STEP_GRACE - 2)
    assert it.orders == []
    it.look(1001, 3)
    assert len(it.orders) == 1


def test_a_request_ended_starts_the_grace_anew(guard, engine, request_):
    it = guard()
    it.look(1001)
    it.look(1001, limit.GRACE - 2)
    entry, _ = running(request_, 10)
    it.look(1001)
    engine.close(entry)
    engine.let_go(entry)
    it.look(1001, limit.GRACE - 2)
    it.look(1001, limit.GRACE - 1)
    assert it.orders == []
    it.look(1001, 2)
    assert len(it.orders) == 1
