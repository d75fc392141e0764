"""Soft and hard: what the guard does at which figure. The test sets the clock and the figures."""

from __future__ import annotations

import threading
import types

import pytest

from kit.pressed import MIB, Entries, running
from shim.core import memory
from shim.core.memory import Usage
from shim.engine import fatal
from shim.guards.exhausted_memory import limit, soft


def test_above_soft_it_trims_first_and_then_turns_away(guard, engine, request_):
    running(request_, 10)
    it = guard()
    it.look(700)
    assert engine.memory_error is None
    assert it.guard.trimmer.excess == 0
    it.look(810)
    assert it.guard.trimmer.excess == (810 - 760) * MIB
    assert engine.memory_error is None, "trimming may be enough"
    it.look(810)
    assert engine.memory_error.status == 503
    assert engine.memory_error.code == "memory_pressure"
    assert engine.memory_error.retry_after
    it.look(790)
    assert engine.memory_error is not None, "just below soft is not enough"
    it.look(750)
    assert engine.memory_error is None
    assert [line.rpartition(": ")[2] for line in it.lines] == [
        "the caches are trimmed",
        "new requests are 503 until it is less",
        "new requests are accepted again",
    ]
    assert all("soft is 800.0 MiB" in line for line in it.lines[:2])


def test_a_moment_above_soft_turns_nobody_away(guard, engine):
    it = guard()
    for figure in (810, 700, 810, 700):
        it.look(figure)
        assert engine.memory_error is None
    assert len(it.lines) == 1


def test_an_episode_above_soft_is_a_line_at_its_begin_and_one_at_its_end(guard):
    it = guard()
    for _ in range(20):
        it.look(810)
        it.look(700)
    assert len(it.lines) == 1
    assert it.lines[0].endswith("soft is 800.0 MiB: the caches are trimmed")
    it.look(780, soft.CALM)
    assert len(it.lines) == 1, "between release and soft it is not over"
    it.look(700)
    assert len(it.lines) == 2
    assert it.lines[1].startswith("memory: 700.0 MiB in use")
    assert it.lines[1].endswith("below soft again")
    it.look(700, soft.CALM)
    assert len(it.lines) == 2
    it.look(810)
    assert len(it.lines) == 3


def test_as_long_as_trimming_is_enough_nobody_is_turned_away(guard, engine, monkeypatch):
    """No matter how much is allocated between two looks."""
    calls = []
    it = guard()
    it.guard.trimmer._mx = types.SimpleNamespace(clear_cache=lambda: calls.append("clear"))
    generator = types.SimpleNamespace(prompt_cache=types.SimpleNamespace(nbytes=0))
    for n in range(3):
        it.look(810)

        # It is over the limit until this round has cleared. The next round's look calls it too, and
        # must see its own `n`.
        def usage(mx):
            over = len(calls) == n  # noqa: B023
            return Usage(0, 0, (810 if over else 700) * MIB)

        monkeypatch.setattr(memory, "usage", usage)
        it.guard.next_request(lambda: None, generator, (), {})
        assert engine.memory_error is None, n
    assert len(calls) == 3


def test_what_malloc_alone_keeps_is_given_back_at_once(guard, engine, monkeypatch):
    it = guard()
    monkeypatch.setattr(
        memory,
        "give_back",
        lambda: monkeypatch.setattr(memory, "usage", lambda mx: Usage(0, 0, 300 * MIB)),
    )
    it.look(1001)
    assert it.guard.trimmer.excess == 0
    assert engine.memory.counted == 300 * MIB
    assert it.lines == []


def test_malloc_is_asked_each_time_as_long_as_that_helps(guard, engine, monkeypatch):
    """A prefill leaves that much in malloc at every step. No request is refused or ended for it."""
    # `kept`: what malloc keeps now, and what it keeps at each look.
    asked, kept = [], [0, 300]
    it = guard()
    monkeypatch.setattr(memory, "give_back", lambda: (asked.append(1), kept.__setitem__(0, 0)))

    def looks(count, live):
        monkeypatch.setattr(memory, "usage", lambda mx: Usage(0, 0, (live + kept[0]) * MIB))
        before = len(asked)
        for _ in range(count):
            kept[0] = kept[1]
            it.look(None)
        return len(asked) - before

    assert looks(4, 750) == 4
    assert engine.memory_error is None
    kept[1] = 0
    assert looks(11, 900) == 3, "it does not help: not at every look"
    assert looks(3, 1001) == 3, "but always before a request is ended"


def test_macos_saying_critical_is_as_soft(guard, engine):
    """Also far below soft: the guard trims, and macOS goes on saying so."""
    it = guard()
    it.look(300, macos=True)
    assert engine.memory_error is None
    it.guard.next_request(lambda: None, types.SimpleNamespace(prompt_cache=Entries(0)), (), {})
    it.look(300, macos=True)
    assert engine.memory_error is not None
    assert "macOS says critical" in it.lines[0]
    it.look(300)
    assert engine.memory_error is None


def test_between_release_and_soft_it_is_trimmed_on_and_let_in_when_idle(guard, engine, request_):
    """Otherwise it would refuse every request without end, while there is room."""
    entry, _ = running(request_, 10)
    it = guard()
    it.look(810)
    it.look(810)
    it.guard.trimmer.excess = 0
    it.look(780)
    assert engine.memory_error is not None
    assert it.guard.trimmer.excess == 20 * MIB
    engine.close(entry)
    engine.let_go(entry)
    it.look(780)
    assert engine.memory_error is None


def test_what_refuses_everybody_for_good_is_replaced(guard, engine, request_):
    entry, _ = running(request_, 10)
    it = guard()
    for _ in range(30):
        it.look(810)
    assert it.orders == [], "a request is being served"
    engine.close(entry)
    engine.let_go(entry)
    it.look(810)
    it.look(810, limit.GRACE - 1)
    assert it.orders == []
    it.look(810)
    assert [order.status for order in it.orders] == [fatal.EX_TEMPFAIL]
    assert "with no request being served, soft is 800.0 MiB" in it.orders[0].why


def test_a_limit_below_the_model_is_left_out(guard, engine, request_):
    running(request_, 10)
    it = guard(begin=900)
    assert it.lines == [
        (
            "MLX_SHIM_MEMORY_SOFT, 800.0 MiB, is ignored:"
            " with its model loaded the process already uses 900.0 MiB"
        )
    ]
    assert engine.ignored_limits == {"memory_soft"}
    for _ in range(3):
        it.look(950)
    assert engine.memory_error is None
    it.look(1001)
    assert engine.memory_error is not None, "hard is in force"
    it.look(970)
    assert engine.memory_error is not None
    it.look(949)
    assert engine.memory_error is None, "without soft, hard counts"


def test_with_both_left_out_macos_alone_decides(guard, engine):
    it = guard(begin=1100)
    assert len(it.lines) == 2
    assert engine.ignored_limits == {"memory_soft", "memory_hard"}
    for macos, pressed in ((True, False), (True, True), (False, False)):
        it.look(1200, macos=macos)
        assert (engine.memory_error is not None) is pressed
    assert it.orders == []


def test_a_look_that_sees_nothing_is_not_the_last(guard, engine, monkeypatch):
    """Without a free file descriptor /proc cannot be read.

    If the guard gave up then, it would refuse every request without end.
    """
    it = guard()
    it.look(810)
    it.look(810)
    assert engine.memory_error is not None
    usage = memory.usage

    def blind(mx):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(memory, "usage", blind)
    it.guard._looked = 0.0
    it.guard()
    monkeypatch.setattr(memory, "usage", usage)
    assert engine.memory_error is not None
    it.look(700)
    assert engine.memory_error is None


def test_a_judge_that_fails_leaves_nobody_turned_away(guard, engine, monkeypatch):
    """The watchdog looks no more then, and nothing else would undo the refusal."""
    it = guard()
    it.look(810)
    it.look(810)
    assert engine.memory_error is not None
    monkeypatch.setattr(memory, "is_critical", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        it.look(810)
    assert engine.memory_error is None


def test_a_batch_that_is_drained_is_trimmed_beside(guard, engine):
    """It asks for no request until it is empty."""
    it = guard()
    trimmed = []
    it.guard.trimmer.trim = lambda excess, soft: trimmed.append(excess)
    engine.generator = types.SimpleNamespace(_generation_thread=threading.Thread())
    it.look(810)
    assert it.guard.step(lambda: "stepped", None, (), {}) == "stepped"
    assert trimmed == [], "another's batch"
    engine.generator = types.SimpleNamespace(_generation_thread=threading.current_thread())
    for _ in range(2):
        assert it.guard.step(lambda: "stepped", None, (), {}) == "stepped"
    assert trimmed == [50 * MIB]
