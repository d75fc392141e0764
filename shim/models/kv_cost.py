"""The bytes that a token takes in the caches of a model, learnt from filled caches.

No model family is known by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Tokens: the answer for caches that do not grow.
ANY_LENGTH = 1 << 32


class Layer(NamedTuple):
    """The memory that one layer keeps for a sequence."""

    # Bytes.
    per_token: float
    # The most tokens that it keeps; infinite for most layers.
    window: float
    # It allocates room for so many tokens at a time.
    step: int
    # Bytes that do not depend on the length, such as the state of a recurrent layer.
    constant: int

    def bytes_of(self, tokens: int) -> float:
        """The bytes for a sequence of so many tokens."""
        steps = math.ceil(min(tokens, self.window) / self.step)
        return self.constant + self.per_token * steps * self.step


class Cost(NamedTuple):
    """The memory that a sequence takes, by its length in tokens."""

    layers: tuple[Layer, ...]

    def bytes_of(self, tokens: int) -> int:
        """The bytes of a sequence of so many tokens."""
        return int(sum(layer.bytes_of(tokens) for layer in self.layers))

    @property
    def per_token(self) -> float:
        """The bytes of one more token, as long as no window is full."""
        return sum(layer.per_token for layer in self.layers)

    def tokens_within(self, room: int) -> int:
        """The length of the longest sequence in `room` bytes; 0 if not even one token fits."""
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


def learn(caches: Sequence[Any]) -> Cost:
    """The cost by the caches of one sequence that holds some tokens.

    The caches of a batch give the cost of all its sequences together.
    """
    return Cost(tuple(_layer(cache) for cache in _flat(caches)))


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        # Only a CacheList has inner caches.
        inner = getattr(cache, "caches", None)
        if inner is not None:
            yield from _flat(inner)
        else:
            yield cache


def _layer(cache: Any) -> Layer:
    """The cost of one cache. With `keys` it grows along their last axis but one.

    Any other cache is taken as constant: then no request is refused for it.
    """
    keys = getattr(cache, "keys", None)
    # Quantized keys are a sequence of values, scales and biases.
    first: Any = keys[0] if isinstance(keys, list | tuple) and keys else keys
    if first is None or getattr(first, "ndim", 0) < 2:  # noqa: PLR2004
        constant = cache.nbytes if keys is None and hasattr(cache, "cache") else 0
        return Layer(0, math.inf, 1, constant)
    window = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None) or math.inf
    return Layer(cache.nbytes / first.shape[-2], window, int(getattr(cache, "step", 1)), 0)
