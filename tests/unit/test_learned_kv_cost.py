"""From which caches the shim learns what a token takes: those of the model that serves."""

from __future__ import annotations

import types

import mlx.core as mx
import pytest
from mlx_lm import server as stock
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from shim.core import settings
from shim.core.errors import ShimError
from shim.core.settings import Settings
from shim.engine import observe
from shim.engine.state import Engine
from shim.guards import unaffordable_prompt

KIB, MIB = 2**10, 2**20
# Bytes of a token in a KVCache of one head of 64.
PER_TOKEN = 2 * 64 * 4


@pytest.fixture
def engine(monkeypatch):
    fresh = Engine()
    monkeypatch.setattr(unaffordable_prompt, "engine", fresh)
    monkeypatch.setattr(settings, "current", Settings(memory_hard=MIB))
    fresh.generator = generator()
    return fresh


def generator(kv_bits=None):
    line = types.SimpleNamespace(kv_bits=kv_bits)
    return types.SimpleNamespace(
        prompt_cache=stock.LRUPromptCache(), model_provider=types.SimpleNamespace(cli_args=line)
    )


@pytest.fixture
def guard(engine):
    """The guard of a server whose model takes so many bytes.

    It has learnt from 256 tokens in these caches.
    """

    def make(model=0, cache=None, where=None):
        made = unaffordable_prompt._Guard(
            types.SimpleNamespace(get_active_memory=lambda: model, array=mx.array)
        )
        made._overhead = 0
        kept = (where or engine.generator).prompt_cache
        made.learn(lambda *_: None, kept, ("m", [1], [filled(cache or KVCache())]), {})
        return made

    return make


def filled(cache):
    cache.update_and_fetch(*[mx.zeros((1, 1, 256, 64))] * 2)
    return cache


def ask(guard, tokens, instance):
    return guard.tokenize(lambda: ([0] * tokens,), instance, (), {})


def test_one_that_cannot_fit_is_refused_with_what_would(engine, guard):
    made = guard(model=MIB // 2)
    assert ask(made, MIB // 2 // PER_TOKEN, engine.generator)
    with pytest.raises(ShimError, match="accepted: 1024 ") as refused:
        ask(made, 1025, engine.generator)
    assert refused.value.status == 400


def test_a_limit_below_the_model_refuses_nobody(engine, guard):
    """Another guard leaves that limit out. Here every prompt would get 400, without end."""
    assert ask(guard(model=MIB), 10, engine.generator)


def test_another_generator_has_a_model_of_its_own(engine, guard):
    other = generator()
    assert ask(guard(where=other), 10**6, engine.generator), "nothing is known of this one's caches"
    assert ask(guard(), 10**6, other)


def test_a_short_cache_does_not_tell_of_one_that_is_going_to_be_quantized(engine, guard):
    engine.generator = generator(kv_bits=8)
    assert ask(guard(), 3000, engine.generator), "quantized, so many tokens take less than hard"
    with pytest.raises(ShimError):
        ask(guard(cache=QuantizedKVCache(64, 8)), 30_000, engine.generator)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_counts_its_batch(engine, monkeypatch, rank):
    """Only rank 0 has entries. If only it counted, the ranks' prompt caches would differ."""
    monkeypatch.setattr(observe, "engine", engine)
    engine.generator._rank = rank
    batch = type("Batch", (), {})()
    engine.inserting = engine.open((), None) if rank == 0 else None
    observe._note_insertion(batch, (), {}, [7])
    assert engine.batch() is batch
    assert list(observe.entries_of(batch)) == ([7] if rank == 0 else [])
