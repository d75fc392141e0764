"""The wait for memory after a kill, and what ends a wait."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path

import pytest

from shim.core import memory
from shim.core.errors import ShimError
from shim.engine.state import Hold
from shim.guards import crash_loop
from shim.guards.crash_loop.state_file import State

GIB = 2**30


@pytest.fixture
def machine(monkeypatch, engine, lines):
    """A machine of 64 GiB with these figures of free memory: one for each look, then the last."""
    monkeypatch.setattr(crash_loop, "engine", engine)
    monkeypatch.setattr(crash_loop, "WAIT_POLL", 0.01)
    monkeypatch.setattr(memory, "total", lambda: 64 * GIB)
    held = []

    def free(*figures):
        told = list(figures)

        def available():
            held.append((engine.start_wait, engine.loading))
            return told.pop(0) if len(told) > 1 else told[0]

        monkeypatch.setattr(memory, "available", available)
        return held

    return free


def test_it_waits_until_the_memory_is_free(machine, lines, engine):
    looks = machine(10 * GIB, 20 * GIB, 39 * GIB, 41 * GIB)
    crash_loop.wait_for_memory(State(killed=True, model=40 * GIB, footprint=60 * GIB))
    assert len(looks) == 5
    hold, loading = looks[1]
    assert (
        hold.reason
        == "the last run was killed, and of the 40.00 GiB that it took 10.00 GiB are free"
    )
    assert loading == 1, "the clock stands still"
    assert engine.start_wait is None
    assert engine.loading == 0
    assert lines[-1] == "41.00 GiB are free: the wait is over"


def test_and_no_longer_than_that(machine, lines, monkeypatch):
    monkeypatch.setattr(crash_loop, "MEMORY_WAIT", 0.2)
    machine(10 * GIB)
    crash_loop.wait_for_memory(State(killed=True, footprint=40 * GIB))
    assert lines[-1] == "10.00 GiB are free, no more: the wait is over"


@pytest.mark.parametrize(
    ("state", "free"),
    [
        (State(killed=False, model=40 * GIB), 1),
        (State(killed=True, model=GIB - 1), 1),
        (State(killed=True), 1),
        (State(killed=True, model=40 * GIB), 40 * GIB),
        # More than the machine has: macOS had compressed it.
        (State(killed=True, model=400 * GIB), 52 * GIB),
        (State(killed=True, model=40 * GIB), None),
    ],
)
def test_no_wait(machine, lines, state, free):
    machine(free)
    crash_loop.wait_for_memory(state)
    assert lines == []


def test_a_request_that_came_before_the_wait_is_told(engine, monkeypatch, request_):
    monkeypatch.setattr(crash_loop, "engine", engine)
    entry, _ = request_()
    crash_loop._check(entry)
    engine.start_wait = Hold("why", time.monotonic() + 7.99)
    with pytest.raises(ShimError, match="why") as told:
        crash_loop._check(entry)
    assert (told.value.status, told.value.code, told.value.retry_after) == (503, "breaker", 8)


def test_a_stop_ends_a_wait(engine, monkeypatch):
    monkeypatch.setattr(crash_loop, "engine", engine)
    engine.attach(type("Generator", (), {"_stop": False})())
    threading.Timer(0.3, setattr, (engine.generator, "_stop", True)).start()
    before = time.monotonic()
    crash_loop.wait("why", 600)
    assert 0.2 < time.monotonic() - before < 30


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux's figures")
def test_what_the_machine_says():
    assert 2**20 < memory.footprint() < memory.total()
    assert 0 < memory.available() <= memory.total()


@pytest.mark.parametrize("distributed", [False, True])
def test_a_stop_during_the_wait_ends_the_loop_that_comes_next(engine, monkeypatch, distributed):
    """Otherwise it takes a queued request, and loads the model for it.

    Several machines leave their loops together.
    """
    monkeypatch.setattr(crash_loop, "engine", engine)
    engine.generator = types.SimpleNamespace(_stop=False, _is_distributed=distributed)
    loaded = []

    def stopped_meanwhile(_):
        engine.draining = True

    monkeypatch.setattr(crash_loop, "_before", stopped_meanwhile)
    crash_loop._load_default(lambda: loaded.append(1), object(), (), {})
    assert loaded == []
    assert engine.generator._stop is not distributed
