"""The ledger's rules, delivery by delivery."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from shim.core import errors
from shim.engine import queues
from shim.engine.entries import DECODE, FINISHED, PREFILL, QUEUED


def test_the_phases_of_a_request(engine, request_, token, context):
    entry, responses = request_()
    assert entry.phase == QUEUED
    responses.put(context())
    assert entry.phase == PREFILL
    responses.put((5, 10))
    assert (entry.phase, entry.processed, entry.total) == (PREFILL, 5, 10)
    responses.put((10, 10))
    assert entry.phase == DECODE
    responses.put(token())
    responses.put(token())
    assert entry.tokens == 2
    responses.put(None)
    assert entry.phase == FINISHED
    assert engine.deliveries == 6
    assert responses.qsize() == 6, "everything is delivered, noted or not"


def test_only_progress_that_advances_its_own_prompt_counts(engine, request_, context):
    entry, responses = request_()
    responses.put(context())
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


def test_a_stop_before_the_context_reaches_it(request_, context):
    entry, responses = request_()
    entry.stopped = True
    its_context = context()
    responses.put(its_context)
    assert its_context.stopped


def test_one_that_left_the_queue_is_not_leaving_the_engine(engine, request_):
    """The generation thread never saw it, so nothing would let go of it."""
    requests = queue.Queue()
    engine.requests = requests
    kept, (entry, responses) = request_(), request_()
    for opened, its_queue in (kept, (entry, responses)):
        opened.queue = its_queue
        requests.put((its_queue, "request"))
    engine.stop(entry)
    engine.close(entry)
    assert [item[0] for item in requests.queue] == [kept[1]]
    assert engine.abandoned == {}
    assert engine.counters["abandoned"] == 1


def test_a_length_has_what_came_from_the_prompt_cache_in_it(request_, token, context):
    """Stock reports progress of the rest only, but the cache holds the whole prompt."""
    entry, responses = request_()
    entry.prompt = 1000
    responses.put(context())
    responses.put((5, 10))
    assert entry.length == 1000
    responses.put((10, 10))
    responses.put(token())
    assert entry.length == 1001
    assert entry.describe(0.0)["prompt_total"] == 10


def test_an_explicit_timeout_is_honoured(request_, token, monkeypatch):
    monkeypatch.setattr(queues, "POLL", 60.0)
    _entry, responses = request_()
    queues.checks.append(lambda entry: None)
    started = time.monotonic()
    with pytest.raises(queue.Empty):
        responses.get(timeout=0.2)
    assert 0.15 < time.monotonic() - started < 30
    with pytest.raises(queue.Empty):
        responses.get(block=False)
    responses.put(token())
    assert isinstance(responses.get(timeout=5), token)


def test_a_waiter_is_woken_at_once_and_looks_around_once_a_second(engine, request_):
    _entry, responses = request_()
    looks = []
    queues.checks.append(lambda entry: looks.append(time.monotonic()))
    caught = []

    def wait():
        caught.append(responses.get())

    waiter = threading.Thread(target=wait)
    started = time.monotonic()
    waiter.start()
    time.sleep(2.5)
    engine.fail_waiting(errors.engine_dead())
    waiter.join(30)
    assert not waiter.is_alive()
    assert isinstance(caught[0], errors.ShimError)
    assert 2 <= len(looks) <= time.monotonic() - started + 1


def test_one_outcome_for_each_request(engine, in_decode):
    for end in (None, RuntimeError("boom")):
        entry, responses = in_decode()
        responses.put(end)
        engine.close(entry)
        engine.close(entry)
    abandoned, _ = in_decode()
    engine.close(abandoned)
    assert engine.counters == {
        "requests": 3,
        "finished": 1,
        "failed": 1,
        "abandoned": 1,
        "timed_out": 0,
    }
