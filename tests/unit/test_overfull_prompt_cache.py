"""The prompt cache under its limit, with stock's class, and what a switch of models frees."""

from __future__ import annotations

import itertools
import threading
import types
import weakref

import pytest
from mlx import nn
from mlx_lm import server as stock
from mlx_lm.models import cache as caches

from shim.core.verdicts import Retired
from shim.engine.state import Engine
from shim.guards import leftover_cache, overfull_prompt_cache, unreturned_weights
from shim.probing import model_switch
from shim.probing.dry_run import Anything

LIMIT = 1000
A, B = ("a", None, None), ("b", None, None)
numbers = itertools.count()


class Layer:
    """Stands for the cache of a layer."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def is_trimmable(self):
        return False


class Broken(Layer):
    nbytes = property(lambda _: 1 / 0, lambda *_: None)


@pytest.fixture
def engine(monkeypatch):
    fresh = Engine()
    for guard in (overfull_prompt_cache, leftover_cache, unreturned_weights):
        monkeypatch.setattr(guard, "engine", fresh)
    provider = types.SimpleNamespace(
        cli_args=types.SimpleNamespace(prompt_cache_bytes=LIMIT),
        pipeline_group=None,
        model_key=A,
        model=None,
    )
    fresh.generator = types.SimpleNamespace(
        model_provider=provider,
        prompt_cache=stock.LRUPromptCache(),
        _generation_thread=threading.current_thread(),
    )
    return fresh


def insert(engine, *entries, entries_of=None):
    """Insert entries, of one layer of so many bytes or of the given layers.

    Returns the bytes that the cache then keeps.
    """
    kept = engine.generator.prompt_cache if entries_of is None else entries_of
    for entry in entries:
        given = [Layer(entry)] if isinstance(entry, int) else entry
        overfull_prompt_cache._insert(
            kept.insert_cache, kept, ("m", [next(numbers)], given), {"cache_type": "user"}
        )
    return kept.nbytes


def batch_of(engine, nbytes):
    batch = types.SimpleNamespace(prompt_cache_nbytes=nbytes)
    engine.batch = lambda: batch


@pytest.mark.guard("overfull_prompt_cache")
def test_the_limit_holds_after_each_insertion(engine):
    assert [insert(engine, 400) for _ in range(4)] == [400, 800, 800, 800]
    batch_of(engine, 500)
    assert insert(engine, 100) == 500
    batch_of(engine, 5000)
    assert insert(engine, 100) == 0, "the batch has it all, and more"


@pytest.mark.guard("overfull_prompt_cache")
def test_an_entry_that_does_not_fit_pushes_out_no_others(engine, lines, monkeypatch):
    monkeypatch.setattr(overfull_prompt_cache.report, "once", lines.append)
    assert insert(engine, 300, 600, LIMIT + 1) == 900
    assert "larger than --prompt-cache-bytes" in lines[0]
    batch_of(engine, 400)
    assert insert(engine, 601) == 600, "with the batch, only the entries that are there already"
    # The batch is over, even if something still holds it.
    engine.serving_alone = True
    assert insert(engine, 400) == 1000


@pytest.mark.guard("overfull_prompt_cache")
def test_beside_a_batch_that_grows(engine):
    insert(engine, 300, 600)
    for size, left in ((0, 900), (101, 600), (LIMIT, 0)):
        batch_of(engine, size)
        asked = overfull_prompt_cache._next_request(
            lambda timeout: timeout, engine.generator, (0.1,), {}
        )
        assert (asked, engine.generator.prompt_cache.nbytes) == (0.1, left)


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_without_a_limit_in_a_pipeline_or_in_another_cache_all_is_stocks(engine, limit):
    engine.generator.model_provider.cli_args.prompt_cache_bytes = limit
    if limit:
        engine.generator.model_provider.pipeline_group = object()
    assert insert(engine, 5000, 5000) == 10_000
    engine.generator.model_provider.pipeline_group = None
    assert insert(engine, 5000, entries_of=caches.LRUPromptCache()) == 5000


def test_what_cannot_be_counted_is_left_to_stock(engine, lines):
    engine.batch = types.SimpleNamespace
    assert insert(engine, 5000) == 5000
    assert "cannot be counted" in lines[0]
    # Like stock. shared_fault contains it.
    with pytest.raises(ZeroDivisionError):
        insert(engine, [Broken(1)])


def test_the_loop_keeps_no_hold_of_an_entry(engine):
    """Variables of stock's loop have the list of its last step."""
    for guard in (overfull_prompt_cache, leftover_cache):
        layer = Layer(10)
        given, gone = [layer], weakref.ref(layer)
        del layer
        kept = engine.generator.prompt_cache
        guard._insert(kept.insert_cache, kept, ("m", [1, 2]), {"prompt_cache": given})
        assert (given, len(kept)) == ([], 1)
        kept.trim_to(n_sequences=0)
        assert gone() is None


@pytest.mark.guard("leftover_cache")
def test_entries_go_with_their_model(engine, monkeypatch):
    provider, kept = engine.generator.model_provider, engine.generator.prompt_cache

    def load(*key):
        left = len(kept)
        return left if key else None

    def switch(former, *key, to=provider):
        kept.insert_cache("m", [1], [Layer(1)])
        provider.model_key = former
        return leftover_cache._load(load, to, key, {})

    assert switch(A, *A) == 1, "the same again"
    assert switch(None, *B) == 1, "nothing was loaded"
    assert switch(A, *B, to=types.SimpleNamespace(model_key=A)) == 1, (
        "the provider of another generator"
    )
    with monkeypatch.context() as context:
        context.setattr(engine.generator, "_generation_thread", threading.Thread())
        assert switch(A, *B) == 1, (
            "another thread of the program must not touch the generation thread's cache"
        )
    assert switch(A, "b") == 0
    assert switch(A, "a", None, "draft") == 0, "with a draft model it has other caches"


def test_a_former_model_is_emptied_before_the_next_is_loaded(engine):
    """Even if something still holds it.

    Not where the switch fails before stock drops it, and not in another thread of the program.
    """
    seen = []

    def run(provider, *, drop):
        release = unreturned_weights._Releasing(
            types.SimpleNamespace(clear_cache=lambda: seen.append("cleared"))
        )
        former = provider.model = nn.Linear(4, 4)
        weight = weakref.ref(former.weight)

        def load():
            seen.append(weight() is None)

        def switch():
            provider.model = None if drop else provider.model
            release.around_load(load, None, (), {})
            release.around_load(load, None, (), {})

        release.around_switch(switch, provider, (), {})
        return former

    provider = engine.generator.model_provider
    assert not run(provider, drop=True)
    assert seen == ["cleared", True, True], "once, for the model and its draft"
    seen.clear()
    assert run(provider, drop=False)
    thread = engine.generator._generation_thread = threading.Thread()
    assert run(provider, drop=True)
    assert seen == [False] * 4
    assert not thread.is_alive()


def module(**cured):
    return types.SimpleNamespace(**{**vars(stock), "__name__": stock.__name__, **cured})


def limited_run(host, port, model_provider):
    line = model_provider.cli_args
    # It runs in a module of mlx_lm.
    ResponseGenerator(  # noqa: F821
        model_provider, stock.LRUPromptCache(line.prompt_cache_size, line.prompt_cache_bytes)
    )


class Generator(stock.ResponseGenerator):
    def _generate(self):
        while not self._stop:
            request = self._next_request()
            if request is not None:
                self.prompt_cache.trim_to(n_sequences=0)
                self.model_provider.load(request[2].model.model)


def test_a_cure_retires_its_guard():
    for guard in (overfull_prompt_cache, leftover_cache, unreturned_weights):
        guard.probe(stock)
    cured = (
        (overfull_prompt_cache, {"run": limited_run}),
        (leftover_cache, {"ResponseGenerator": Generator}),
    )
    for guard, names in cured:
        with pytest.raises(Retired):
            guard.probe(module(**names))
    # 0.32 clears the pool: the run leaves its loop.
    with pytest.raises(Retired):
        unreturned_weights.probe(module(ResponseGenerator=Generator))
    assert model_switch.run(stock, Anything())
