"""What a token takes in the caches of a model, learnt from a cache that has been filled. No model family is known by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Layer(NamedTuple):
    """Bytes that one layer keeps for a sequence."""

    per_token: float
    window: float  # tokens, of which it keeps no more; infinite for most
    step: int  # tokens it takes room for at a time
    constant: int  # whatever the length, as the state of a recurrent layer


class Cost(NamedTuple):
    """Of a sequence, by its length in tokens."""

    layers: tuple[Layer, ...]

    def bytes_of(self, tokens: int) -> int:
        """For a sequence of so many tokens."""
        return int(
            sum(
                layer.constant
                + layer.per_token * math.ceil(min(tokens, layer.window) / layer.step) * layer.step
                for layer in self.layers
            )
        )

    @property
    def per_token(self) -> float:
        """Bytes that one more token takes, as long as no window is full."""
        return sum(layer.per_token for layer in self.layers)

    def tokens_within(self, room: int) -> int:
        """The longest sequence that takes no more than `room` bytes; 0 where not even one token does."""
        if self.bytes_of(1) > room:
            return 0
        low, high = 1, 2
        while self.bytes_of(high) <= room:
            low, high = high, 2 * high
            if high > ANY_LENGTH:
                return ANY_LENGTH
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_of(middle) <= room else (low, middle)
        return low


ANY_LENGTH = 1 << 32  # tokens: nothing grows


def learn(caches: Sequence[Any]) -> Cost:
    """From the caches of one sequence that holds some tokens; one of a batch gives the cost of all its sequences."""
    return Cost(tuple(_layer(cache) for cache in _flat(caches)))


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        inner = getattr(cache, "caches", None)  # of a CacheList
        if inner is not None:
            yield from _flat(inner)
        else:
            yield cache


def _layer(cache: Any) -> Layer:
    """One with `keys` grows along their last axis but one; any other is taken for constant, which refuses nobody."""
    keys = getattr(cache, "keys", None)
    first: Any = (
        keys[0] if isinstance(keys, list | tuple) and keys else keys
    )  # quantized: values, scales and biases
    if first is None or getattr(first, "ndim", 0) < 2:  # noqa: PLR2004
        return Layer(
            0, math.inf, 1, cache.nbytes if keys is None and hasattr(cache, "cache") else 0
        )
    window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None) or math.inf
    return Layer(cache.nbytes / first.shape[-2], window, int(getattr(cache, "step", 1)), 0)
