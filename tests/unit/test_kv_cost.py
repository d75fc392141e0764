"""What a token takes: told from one filled cache, it is right for other lengths of the cache."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import cache

from shim.models import kv_cost

HEADS, DIM = 2, 32


def filled(made, tokens):
    """Put so many tokens into `made`: a prompt of all but one, and a step of one."""
    for length in (tokens - 1, 1):
        keys = mx.ones((1, HEADS, length, DIM))
        made.update_and_fetch(keys, 2 * keys)
    return made


GROWING = {
    "KVCache": lambda n: filled(cache.KVCache(), n),
    "ConcatenateKVCache": lambda n: filled(cache.ConcatenateKVCache(), n),
    "QuantizedKVCache": lambda n: filled(cache.QuantizedKVCache(group_size=32, bits=8), n),
    "RotatingKVCache": lambda n: filled(cache.RotatingKVCache(max_size=1 << 20), n),
}


@pytest.mark.parametrize("kind", GROWING)
def test_what_grows(kind):
    cost = kv_cost.learn([GROWING[kind](300)])
    assert cost.per_token > 0
    for tokens in (40, 300, 700, 1500):
        assert cost.bytes_of(tokens) == pytest.approx(GROWING[kind](tokens).nbytes, rel=0.35), (
            tokens
        )
    assert cost.bytes_of(100_000) >= 100_000 * cost.per_token


def test_a_window_takes_no_more_than_itself():
    cost = kv_cost.learn([filled(cache.RotatingKVCache(max_size=512), 200)])
    assert (
        cost.bytes_of(100_000)
        == cost.bytes_of(512)
        == filled(cache.RotatingKVCache(max_size=512), 2000).nbytes
    )


def test_what_is_constant_and_what_is_made_of_several():
    state = cache.ArraysCache(2)
    state[0] = mx.zeros((1, 4, 8))
    cost = kv_cost.learn([cache.CacheList(state, filled(cache.KVCache(), 256)), cache.KVCache()])
    assert cost.bytes_of(256) == state.nbytes + 2 * 256 * HEADS * DIM * 4
    assert cost.bytes_of(512) == state.nbytes + 4 * 256 * HEADS * DIM * 4
    assert kv_cost.learn([state]).bytes_of(1) == kv_cost.learn([state]).bytes_of(10**6) == 4 * 8 * 4


def test_what_is_not_known_refuses_nobody():
    class Other:
        nbytes = 10**12

    assert kv_cost.learn([Other()]).bytes_of(10**6) == 0
    assert kv_cost.learn([]).tokens_within(1) > 10**9


@pytest.mark.parametrize("room", [10_000_000, 5_000_001, 700_000])
def test_tokens_within_is_the_longest_that_fits(room):
    cost = kv_cost.learn(
        [filled(cache.KVCache(), 300), filled(cache.RotatingKVCache(max_size=512), 300)]
    )
    tokens = cost.tokens_within(room)
    assert cost.bytes_of(tokens) <= room < cost.bytes_of(tokens + 1)


def test_where_nothing_fits():
    assert kv_cost.learn([filled(cache.KVCache(), 300)]).tokens_within(1000) == 0
    assert kv_cost.learn([filled(cache.KVCache(), 300)]).tokens_within(-5) == 0
