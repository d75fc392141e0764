"""The ledger's rules, delivery by delivery; and the stall verdicts, second by second of the engine's clock."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from shim import engine as engine_module
from shim import errors, ledger, settings
from shim.engine import DECODE, FINISHED, PREFILL, QUEUED, Engine
from shim.guards import stall


class Token:
    """Stands for the stock class Response."""


class Context:
    stopped = False

    def stop(self):
        self.stopped = True


@pytest.fixture
def engine(monkeypatch):
    fresh = Engine()
    for module in (engine_module, ledger, stall):
        monkeypatch.setattr(module, "engine", fresh)
    monkeypatch.setattr(ledger, "checks", [])
    monkeypatch.setattr(stall, "_suspects", {})
    monkeypatch.setattr(stall, "_paused", 0.0)
    return fresh


@pytest.fixture
def request_(engine):
    """Open a request: its entry and its queue."""

    def make():
        entry = engine.open(object(), object())
        return entry, ledger.ResponseQueue(entry, Token)

    return make


def test_the_phases_of_a_request(engine, request_):
    entry, responses = request_()
    assert entry.phase == QUEUED
    responses.put(Context())
    assert entry.phase == PREFILL
    responses.put((5, 10))
    assert (entry.phase, entry.processed, entry.total) == (PREFILL, 5, 10)
    responses.put((10, 10))
    assert entry.phase == DECODE
    responses.put(Token())
    responses.put(Token())
    assert entry.tokens == 2
    responses.put(None)
    assert entry.phase == FINISHED
    assert engine.deliveries == 6
    assert responses.qsize() == 6, "everything is delivered, whatever is noted"


def test_only_progress_that_advances_its_own_prompt_counts(engine, request_):
    entry, responses = request_()
    responses.put(Context())
    responses.put((5, 10))
    engine.clock = 7.0
    for stale in ((5, 10), (4, 10), (0, 0)):
        responses.put(stale)
    assert entry.last == 0.0
    responses.put((10, 10))
    assert entry.last == 7.0
    engine.clock = 9.0
    responses.put((11, 12))
    assert entry.last == 7.0, "a request whose prompt is complete counts only tokens"


def test_a_stop_before_the_context_reaches_it(request_):
    entry, responses = request_()
    entry.stopped = True
    context = Context()
    responses.put(context)
    assert context.stopped


def test_an_explicit_timeout_is_honoured(request_):
    _entry, responses = request_()
    ledger.checks.append(lambda entry: None)
    started = time.monotonic()
    with pytest.raises(queue.Empty):
        responses.get(timeout=0.2)
    assert 0.15 < time.monotonic() - started < 1.0
    with pytest.raises(queue.Empty):
        responses.get(block=False)
    responses.put(Token())
    assert isinstance(responses.get(timeout=5), Token)


def test_a_waiter_is_woken_at_once_and_looks_around_once_a_second(engine, request_):
    _entry, responses = request_()
    looks = []
    ledger.checks.append(lambda entry: looks.append(time.monotonic()))
    caught = []

    def wait():
        caught.append(responses.get())

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(2.5)
    engine.fail_waiting(errors.engine_dead())
    waiter.join(1)
    assert not waiter.is_alive()
    assert isinstance(caught[0], errors.ShimError)
    assert 2 <= len(looks) <= 4


def judge(engine, entry):
    return stall._judge(entry, list(engine.entries.values()), engine.clock)


def in_decode(request_):
    entry, responses = request_()
    responses.put(Context())
    responses.put((1, 1))
    responses.put(Token())
    return entry, responses


def test_a_silent_decode_alone(engine, request_):
    entry, _ = in_decode(request_)
    engine.clock = settings.Settings().decode_stall - 1
    assert judge(engine, entry) is None
    engine.clock += 1
    assert "no token for 120 s" in judge(engine, entry)


def test_a_silent_decode_beside_a_prefill_of_others(engine, request_):
    """One step may prefill others for minutes: only what they are given meanwhile proves that a token was owed."""
    entry, _ = in_decode(request_)
    _other, others = request_()
    others.put(Context())
    engine.clock = 540.0
    for n in range(1, 9):  # one step's progress
        others.put((n, 100))
    assert judge(engine, entry) is None
    for n in range(9, 9 + stall.OTHERS):
        others.put((n, 100))
    assert "deliveries went to others" in judge(engine, entry)


def test_steps_prove_more_than_deliveries(engine, request_):
    """Twenty-four requests arrive while one step runs for minutes, or were given the tokens of its last step after it."""
    engine.steps = 7
    entry, _ = in_decode(request_)
    queues = [request_()[1] for _ in range(24)]
    for responses in queues:
        responses.put(Context())
    engine.clock = 590.0
    engine.steps = 8
    assert judge(engine, entry) is None, "one more step is under way, or being handed out"
    engine.steps = 9
    assert "no token for 590 s" in judge(engine, entry)


def test_a_prompt_whose_client_has_left_still_explains_the_silence(engine, request_):
    engine.steps = 7
    entry, _ = in_decode(request_)
    gone, responses = request_()
    responses.put(Context())
    engine.close(gone)
    engine.clock = 200.0
    known = [*engine.entries.values(), *engine.leaving.values()]
    assert stall._judge(entry, known, engine.clock) is None
    assert gone.id in engine.leaving
    engine.let_go(gone)
    assert judge(engine, entry) is not None


def test_an_engine_stuck_in_a_request_that_was_abandoned(engine, request_, monkeypatch):
    """Clients that give up sooner than the limit, and try again, must not hide it."""
    seen = []
    monkeypatch.setattr(stall, "_stalled", lambda entry, why: seen.append(entry))
    stuck, _ = in_decode(request_)
    for second in range(0, 130, 2):
        engine.clock = float(second)
        if second == 2:
            engine.close(stuck)
        retry, _ = request_()
        stall._check()
        engine.close(retry)
    assert seen[0] is stuck


def test_a_limit_of_zero_is_none(engine, request_, monkeypatch):
    monkeypatch.setattr(settings, "current", settings.Settings(decode_stall=0, prefill_stall=0))
    entry, _ = in_decode(request_)
    request_()
    engine.clock = 10_000.0
    assert judge(engine, entry) is None


def test_tokenizing_for_long_explains_the_silence(engine, request_):
    entry, _ = in_decode(request_)
    engine.clock = 200.0
    engine.tokenizing = True
    assert judge(engine, entry) is None


def test_one_outcome_for_each_request(engine, request_):
    for end in (None, RuntimeError("boom")):
        entry, responses = in_decode(request_)
        responses.put(end)
        engine.close(entry)
        engine.close(entry)
    abandoned, _ = in_decode(request_)
    engine.close(abandoned)
    assert engine.counters == {"requests": 3, "finished": 1, "failed": 1, "abandoned": 1, "timed_out": 0}


def test_a_silent_decode_for_longer_than_any_prefill(engine, request_):
    entry, _ = in_decode(request_)
    _, others = request_()
    others.put(Context())
    engine.clock = 600.0
    assert judge(engine, entry) == "no token for 600 s"


def test_a_silent_prefill(engine, request_):
    entry, responses = request_()
    responses.put(Context())
    responses.put((1, 10))
    engine.clock = 599.0
    assert judge(engine, entry) is None
    engine.clock = 600.0
    assert "no progress in its prompt for 600 s" in judge(engine, entry)


def test_a_prefill_that_waits_for_its_turn(engine, request_):
    """Nothing of its prompt was done yet: while others are delivered to, it merely waits."""
    entry, responses = request_()
    responses.put(Context())
    _, others = in_decode(request_)
    engine.clock = 590.0
    others.put(Token())
    engine.clock = 1000.0
    assert judge(engine, entry) is None
    engine.clock = 1190.0
    assert "nothing delivered to anyone for 600 s" in judge(engine, entry)


def test_a_queued_request(engine, request_):
    entry, _ = request_()
    _, others = in_decode(request_)
    engine.clock = 599.0
    others.put(Token())
    engine.clock = 1198.0
    assert judge(engine, entry) is None
    engine.clock = 1199.0
    assert "while it waits" in judge(engine, entry)


def test_a_verdict_must_hold(engine, request_, monkeypatch):
    """The watchdog may look while a step's deliveries are being handed out, one after another."""
    seen = []
    monkeypatch.setattr(stall, "_stalled", lambda entry, why: seen.append(why))
    _entry, responses = in_decode(request_)
    engine.clock = 130.0
    stall._check()
    assert seen == []
    responses.put(Token())
    engine.clock = 131.5
    stall._check()
    assert seen == []
    engine.clock = 260.0
    stall._check()
    engine.clock = 261.1
    stall._check()
    assert len(seen) == 1


def test_a_full_batch_is_no_stall_of_those_in_prefill(engine, request_):
    class Arguments:
        decode_concurrency = 2
        prompt_concurrency = 1

    class Generator:
        cli_args = Arguments

    engine.generator = Generator()
    entry, responses = request_()
    responses.put(Context())
    responses.put((1, 10))
    decoders = [in_decode(request_) for _ in range(2)]
    engine.clock = 900.0
    stall._note_pause(list(engine.entries.values()), engine.clock)
    assert judge(engine, entry) is None
    for _, others in decoders:
        others.put(None)
    engine.clock = 1499.0
    stall._note_pause(list(engine.entries.values()), engine.clock)
    assert judge(engine, entry) is None, "since the pause ended"
    engine.clock = 1500.0
    assert judge(engine, entry) is not None
