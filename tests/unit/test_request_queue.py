"""A request that is put on a queue of a generator gets an entry, whatever the server calls it."""

from __future__ import annotations

import queue
import types

import pytest

from shim.core import errors
from shim.engine import facts, queues
from shim.engine.entries import DECODE, PREFILL


@pytest.fixture
def requests(engine):
    """The queue of a generator that the engine watches."""
    generator = types.SimpleNamespace(inbox=queue.Queue())
    queues.watch(generator, engine)
    # Stock's `generate` is running.
    engine.local.asking = True
    return generator.inbox


@pytest.fixture
def request_():
    """A request in stock's form: (its response queue, the request, its arguments)."""
    return queue.Queue(), object(), object()


def test_a_request_opens_an_entry_and_its_queue_is_ours(engine, requests, request_):
    responses, asked, arguments = request_
    requests.put(request_)
    (entry,) = engine.entries.values()
    assert isinstance(responses, queues.ResponseQueue)
    assert engine.entry_of(asked) is engine.entry_of(arguments) is entry
    assert requests.get() == request_, "the engine gets the request itself"
    assert queue.Queue is not type(requests)
    assert type(queue.Queue()) is queue.Queue, "the standard library stays as it is"


@pytest.mark.parametrize(
    "shape", [tuple, list, lambda parts: (*parts[1:], parts[0]), lambda parts: ("more", *parts)]
)
def test_the_order_and_number_of_the_parts_do_not_matter(engine, requests, request_, shape):
    requests.put(shape(request_))
    assert len(engine.entries) == 1
    assert isinstance(request_[0], queues.ResponseQueue)
    (entry,) = engine.entries.values()
    engine.stop(entry)
    assert requests.qsize() == 0, "withdrawn, because no client waits for it"


@pytest.mark.parametrize("item", [None, "stop", (1, 2), ()])
def test_what_brings_no_queue_is_no_request(engine, requests, item):
    requests.put(item)
    assert engine.entries == {}
    assert requests.get() == item


def test_what_a_program_puts_there_beside_requests_is_its_own(engine, requests, request_):
    engine.local.asking = False
    requests.put(request_)
    assert engine.entries == {}
    assert type(request_[0]) is queue.Queue


def test_queues_of_a_class_of_their_own_are_watched_and_keep_it(engine, monkeypatch):
    class Counting(queue.Queue):
        puts = 0

        def put(self, *args, **kwargs):
            Counting.puts += 1
            super().put(*args, **kwargs)

    generator, responses = types.SimpleNamespace(inbox=Counting()), Counting()
    queues.watch(generator, engine)
    engine.local.asking = True
    generator.inbox.put((responses, object()))
    responses.put(types.SimpleNamespace(prompt=[1]))
    assert Counting.puts == 2
    (entry,) = engine.entries.values()
    assert entry.phase == PREFILL
    assert isinstance(responses, Counting)


def test_a_request_without_a_queue_costs_the_fact(engine, requests, monkeypatch):
    monkeypatch.setattr(facts, "on_loss", [])
    requests.put((queue.SimpleQueue(), object()))
    assert not facts.has("deliveries")


def test_one_that_the_engine_lets_go_of_is_closed_where_no_handler_will(engine, requests, request_):
    requests.put(request_)
    (entry,) = engine.entries.values()
    request_[0].put(types.SimpleNamespace(stop=lambda: None))
    engine.let_go(entry)
    assert engine.entries == engine.abandoned == {}


def test_a_token_is_told_by_what_it_has(engine, requests, request_):
    """The shim needs no name of the server: an object with a token or a text is a token.

    The first one tells the class of the others.
    """
    responses, _, _ = request_
    requests.put(request_)
    (entry,) = engine.entries.values()
    responses.put(types.SimpleNamespace(prompt=[1]))
    assert entry.phase == PREFILL
    responses.put(types.SimpleNamespace(done=3))
    assert (entry.phase, engine.deliveries) == (PREFILL, 2), (
        "progress of another shape is a delivery, not a token"
    )
    responses.put(types.SimpleNamespace(token=7))
    responses.put(types.SimpleNamespace(text="x"))
    assert (entry.phase, entry.tokens) == (DECODE, 2)


def test_a_refusal_before_the_engine_gets_it(engine, requests, request_, monkeypatch):
    def refuse():
        raise errors.engine_dead()

    monkeypatch.setattr(queues, "admissions", [refuse])
    with pytest.raises(errors.ShimError):
        requests.put(request_)
    assert (requests.qsize(), engine.entries) == (0, {})


def test_turns_are_seen_by_the_queue_where_the_loop_cannot_be_wrapped(
    engine, requests, monkeypatch
):
    with pytest.raises(queue.Empty):
        requests.get(timeout=0.001)
    assert (engine.turns, engine.up) == (0, False), "the wrapper around _next_request tells"
    monkeypatch.setattr(facts.known["turns"], "lost", "for a test")
    with pytest.raises(queue.Empty):
        requests.get_nowait()
    assert (engine.turns, engine.up) == (1, True)


def test_a_generator_without_a_queue(engine):
    with pytest.raises(LookupError, match=r"holds no queue\.Queue"):
        queues.watch(types.SimpleNamespace(inbox=queue.SimpleQueue()), engine)
