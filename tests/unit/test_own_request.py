"""A request of the shim's own: first in the queue, counted as none, its caches kept by nobody."""

from __future__ import annotations

import queue
import types

import pytest

from shim.engine import own_request, queues
from shim.engine.entries import FINISHED
from shim.engine.own_request import OwnRequest


@pytest.fixture
def own(engine, monkeypatch):
    monkeypatch.setattr(own_request, "engine", engine)
    monkeypatch.setattr(own_request, "_unfiled", [])
    return OwnRequest("/v1/completions", {"prompt": "x"}, 2)


@pytest.fixture
def requests(engine):
    generator = types.SimpleNamespace(inbox=queue.Queue())
    queues.watch(generator, engine)
    engine.local.asking = True
    return generator.inbox


def put(engine, requests, whose, max_tokens=512):
    engine.local.own = whose
    item = queue.Queue(), object(), types.SimpleNamespace(max_tokens=max_tokens)
    requests.put(item)
    engine.local.own = None
    return item


def test_it_is_first_and_asks_for_little(engine, requests, own):
    theirs = put(engine, requests, None)
    ours = put(engine, requests, own)
    assert requests.get() is ours
    assert requests.get() is theirs
    assert (ours[2].max_tokens, theirs[2].max_tokens) == (2, 512)
    assert own.asked.is_set()
    assert put(engine, requests, own, max_tokens=1)[2].max_tokens == 1


def test_it_is_in_no_counter(engine, requests, own):
    put(engine, requests, own)
    assert engine.counters["requests"] == 0
    own.entry.processed, own.entry.tokens = 7, 2
    engine.close(own.entry)
    assert set(engine.counters.values()) == {0}
    assert engine.closed_tokens == 0


def test_its_caches_are_told_by_their_tokens(engine, requests, own):
    put(engine, requests, own)
    own.entry.context = types.SimpleNamespace(prompt=[1, 2, 3])
    own_request._unfiled[:] = [own]
    kept = []

    def insert(model, tokens, prompt_cache):
        kept.append(tokens)

    for tokens in ([1, 2], [1, 9, 3], [4], [1, 2, 3, 4], [1, 2, 3, 4]):
        own_request._insert(insert, None, ("model", tokens, ["cache"]), {})
    assert kept == [[1, 9, 3], [4], [1, 2, 3, 4]], "once it has been told whole, others are others'"
    assert own.filed.is_set()
    own.entry.phase = FINISHED
    assert not own.is_of([1, 2]), "a part comes before the end"


def test_a_request_that_is_ended_tells_its_handler(engine, requests, own):
    responses, *_ = put(engine, requests, own)
    error = own_request.ShimError(504, "request_timeout", "late")
    own.end(error)
    assert responses.get_nowait() is error
    assert requests.qsize() == 0, "the engine never gets it"
