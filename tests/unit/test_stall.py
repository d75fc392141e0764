"""The stall verdicts, second by second of the engine's clock."""

from __future__ import annotations

import types

import pytest

from shim.core import settings
from shim.engine import facts
from shim.guards import stall


def judge(engine, entry):
    return stall._judge(entry, list(engine.entries.values()), engine)


def test_a_silent_decode_alone(engine, in_decode):
    entry, _ = in_decode()
    engine.clock = settings.Settings().decode_stall - 1
    assert judge(engine, entry) is None
    engine.clock += 1
    assert "no token for 120 s" in judge(engine, entry)


def test_a_silent_decode_beside_a_prefill_of_others(engine, request_, context, in_decode):
    """One step may prefill others for minutes. Only their deliveries prove that a token was due."""
    entry, _ = in_decode()
    _other, others = request_()
    others.put(context())
    engine.clock = 540.0
    # The progress of one step.
    for n in range(1, 9):
        others.put((n, 100))
    assert judge(engine, entry) is None
    for n in range(9, 9 + stall.STARVED_DELIVERIES):
        others.put((n, 100))
    assert "deliveries went to others" in judge(engine, entry)


def test_steps_prove_more_than_deliveries(engine, request_, context, in_decode):
    """24 requests arrive while one step runs for minutes, or get its last tokens after it."""
    engine.steps = 7
    entry, _ = in_decode()
    queues = [request_()[1] for _ in range(24)]
    for responses in queues:
        responses.put(context())
    engine.clock = 590.0
    engine.steps = 8
    assert judge(engine, entry) is None, (
        "one more step is running, or its tokens are being delivered"
    )
    engine.steps = 9
    assert "no token for 590 s" in judge(engine, entry)


def test_a_prompt_whose_client_has_left_still_explains_the_silence(
    engine, request_, context, in_decode
):
    engine.steps = 7
    entry, _ = in_decode()
    gone, responses = request_()
    responses.put(context())
    engine.close(gone)
    engine.clock = 200.0
    known = [*engine.entries.values(), *engine.abandoned.values()]
    assert stall._judge(entry, known, engine) is None
    assert gone.id in engine.abandoned
    engine.let_go(gone)
    assert judge(engine, entry) is not None


def test_an_engine_stuck_in_a_request_that_was_abandoned(engine, request_, monkeypatch, in_decode):
    """Clients that give up before the limit, and try again, must not hide it."""
    seen = []
    monkeypatch.setattr(stall, "_stalled_request", lambda entry, why: seen.append(entry))
    stuck, _ = in_decode()
    for second in range(0, 130, 2):
        engine.clock = float(second)
        if second == 2:
            engine.close(stuck)
        retry, _ = request_()
        stall._check()
        engine.close(retry)
    assert seen[0] is stuck


def test_a_limit_of_zero_is_none(engine, request_, monkeypatch, in_decode):
    monkeypatch.setattr(settings, "current", settings.Settings(decode_stall=0, prefill_stall=0))
    entry, _ = in_decode()
    request_()
    engine.clock = 10_000.0
    assert judge(engine, entry) is None


def test_tokenizing_for_long_explains_the_silence(engine, in_decode):
    entry, _ = in_decode()
    engine.clock = 200.0
    engine.tokenizing = True
    assert judge(engine, entry) is None


def test_a_silent_decode_for_longer_than_any_prefill(engine, request_, context, in_decode):
    entry, _ = in_decode()
    _, others = request_()
    others.put(context())
    engine.clock = 600.0
    assert judge(engine, entry) == "no token for 600 s"


def test_a_silent_prefill(engine, request_, context):
    entry, responses = request_()
    responses.put(context())
    responses.put((1, 10))
    engine.clock = 599.0
    assert judge(engine, entry) is None
    engine.clock = 600.0
    assert "no progress in its prompt for 600 s" in judge(engine, entry)


def test_a_prefill_that_waits_for_its_turn(engine, request_, token, context, in_decode):
    """The engine has not begun its prompt. While others get deliveries, it only waits."""
    entry, responses = request_()
    responses.put(context())
    _, others = in_decode()
    engine.clock = 590.0
    others.put(token())
    engine.clock = 1000.0
    assert judge(engine, entry) is None
    engine.clock = 1190.0
    assert "nothing delivered to anyone for 600 s" in judge(engine, entry)


def test_a_queued_request(engine, request_, token, in_decode):
    entry, _ = request_()
    _, others = in_decode()
    engine.clock = 599.0
    others.put(token())
    engine.clock = 1198.0
    assert judge(engine, entry) is None
    engine.clock = 1199.0
    assert "while it waits" in judge(engine, entry)


def test_a_verdict_must_hold(engine, monkeypatch, token, in_decode):
    """The watchdog may look in the middle of a step's deliveries."""
    seen = []
    monkeypatch.setattr(stall, "_stalled_request", lambda entry, why: seen.append(why))
    _entry, responses = in_decode()
    engine.clock = 130.0
    stall._check()
    assert seen == []
    responses.put(token())
    engine.clock = 131.5
    stall._check()
    assert seen == []
    engine.clock = 260.0
    stall._check()
    engine.clock = 261.1
    stall._check()
    assert len(seen) == 1


def test_a_full_batch_is_no_stall_of_those_in_prefill(engine, request_, context, in_decode):
    class Arguments:
        decode_concurrency = 2
        prompt_concurrency = 1

    class Generator:
        cli_args = Arguments

    engine.generator = Generator()
    entry, responses = request_()
    responses.put(context())
    responses.put((1, 10))
    decoders = [in_decode() for _ in range(2)]
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


@pytest.fixture
def answering(engine, monkeypatch):
    """Deliveries cannot be seen. Answer n began at 0 of the clock.

    `.frame` is where the generation thread stands.
    """
    monkeypatch.setattr(facts.known["deliveries"], "lost", "for a test")
    monkeypatch.setattr(stall._Standing, "frame", None)
    state = types.SimpleNamespace(frame=types.SimpleNamespace(f_lasti=1), verdicts=[], answers=[])
    monkeypatch.setattr(stall.anatomy, "frame_of", lambda thread: state.frame)
    monkeypatch.setattr(stall, "_stalled", lambda who, why: state.verdicts.append(why))
    for n in range(2):
        engine.answers[n] = types.SimpleNamespace(silent_since=0.0, writing=False)
        state.answers.append(engine.answers[n])
    stall._check()
    return state


def test_bytes_alone_where_the_generation_thread_stands_still(engine, answering):
    engine.clock = 599.0
    stall._check()
    assert answering.verdicts == []
    engine.clock = 600.0
    stall._check()
    assert answering.verdicts == [
        "no byte of 2 answers and no move of the generation thread for 600 s"
    ]


@pytest.mark.parametrize(
    "sign", ["moves", "other frame", "a byte", "a client that does not read", "nobody waits"]
)
def test_any_sign_of_life_where_only_bytes_are_seen(engine, answering, sign):
    engine.clock = 590.0
    if sign == "moves":
        answering.frame.f_lasti = 2
    elif sign == "other frame":
        answering.frame = types.SimpleNamespace(f_lasti=1)
    elif sign == "a byte":
        answering.answers[0].silent_since = 590.0
    elif sign == "a client that does not read":
        for answer in answering.answers:
            answer.writing = True
    else:
        engine.answers.clear()
    stall._check()
    engine.clock = 620.0
    stall._check()
    assert answering.verdicts == []
