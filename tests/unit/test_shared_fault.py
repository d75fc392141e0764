"""Which request a fault belongs to, and which faults are never contained."""

from __future__ import annotations

import pytest

from shim.engine import state as engine_module
from shim.engine.entries import FINISHED
from shim.guards import shared_fault


class Broken:
    """A detokenizer that fails at every access."""

    def __init__(self, error):
        self.error = error

    def add_token(self, token):
        raise self.error

    finalize = add_token

    @property
    def last_segment(self):
        raise self.error


@pytest.fixture
def engine(engine, monkeypatch):
    monkeypatch.setattr(shared_fault, "engine", engine)
    return engine


@pytest.fixture
def inserted(engine, in_decode):
    """A request in decode, just put into the batch. Returns its entry and its queue."""
    entry, responses = in_decode()
    engine.local.inserted = entry
    return entry, responses


def drained(responses):
    return [responses.get_nowait() for _ in range(responses.qsize())]


def test_a_detokenizer_that_fails_ends_its_own_request(engine, inserted, token, capfd):
    entry, responses = inserted
    error = IndexError("list index out of range")
    detokenizer = shared_fault._detokenizer(lambda _: Broken(error), None)
    drained(responses)
    detokenizer.add_token(300)
    assert (entry.phase, entry.outcome, entry.stopped, entry.context.stopped) == (
        FINISHED,
        "failed",
        True,
        True,
    )
    assert detokenizer.last_segment == ""
    responses.put(token())
    detokenizer.add_token(301)
    responses.put(None)
    assert drained(responses) == [error], "nothing follows the error"
    assert (error._shim_origin, error._shim_where) == ("engine", "the detokenizer")
    assert (entry.phase, entry.tokens) == (FINISHED, 1)
    assert capfd.readouterr().err.count("failed alone") == 1
    engine.close(entry)
    assert (engine.counters["failed"], engine.abandoned) == (1, {})


def test_a_detokenizer_that_cannot_be_made(inserted):
    """0.31.3 with a vocabulary that has gaps: stock makes it after the request is in the batch."""
    entry, responses = inserted
    error = IndexError("list assignment index out of range")

    def make(_):
        raise error

    detokenizer = shared_fault._detokenizer(make, None)
    detokenizer.add_token(1)
    detokenizer.finalize()
    assert detokenizer.last_segment == ""
    assert entry.outcome == "failed"
    assert drained(responses)[-1] is error


def test_others_get_stocks_own_detokenizer(engine):
    stock = object()
    assert shared_fault._detokenizer(lambda _: stock, None) is stock
    engine.serving_alone = True
    error = ValueError("x")
    alone = shared_fault._detokenizer(lambda _: Broken(error), None)
    with pytest.raises(ValueError, match="x"):
        alone.add_token(1)
    assert error._shim_where == "the detokenizer"


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, NotImplementedError])
def test_what_may_be_mlx_is_a_death(inserted, kind):
    entry, _ = inserted
    detokenizer = shared_fault._detokenizer(lambda _: Broken(kind("x")), None)
    with pytest.raises(kind):
        detokenizer.add_token(1)
    with pytest.raises(kind):
        _ = detokenizer.last_segment
    assert entry.outcome is None


def test_several_machines_must_agree(engine, inserted, monkeypatch):
    monkeypatch.setattr(engine_module.Engine, "distributed", True)
    detokenizer = shared_fault._detokenizer(lambda _: Broken(KeyError(1)), None)
    with pytest.raises(KeyError):
        detokenizer.add_token(1)


def test_a_batch_of_somebody_else_raises(engine, inserted):
    def extract(index):
        raise ValueError("x")

    class Part:
        uids = (0,)

    with pytest.raises(ValueError, match="x"):
        shared_fault._extract_cache(extract, Part(), (0,), {})


def test_a_prompt_cache_of_somebody_else_raises():
    class Layer:
        @property
        def nbytes(self):
            raise ValueError("x")

    def insert(model, tokens, prompt_cache):
        return sum(layer.nbytes for layer in prompt_cache)

    with pytest.raises(ValueError, match="x"):
        shared_fault._Keeping(all)(insert, object(), ("model", [1], [Layer()]), {})
