"""`BatchKVCache.offset` leaks a buffer a token in every attention layer without rotary positions.

Each update sets `offset` to a lazy `offset + n`. Layers with rotary positions evaluate it in
every step. Layers without positional encoding (nemotron_h, kimi_linear, kimi_k3) never do, and
the chain grows as that of ArraysCache.advance does. Upstream fixed it for BatchRotatingKVCache
(960), not for this class. Here an update adds to a Python integer.
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import Incompatible, Retired, require
from ..models import deferred_offset

UPSTREAM = "no issue known; mlx-lm 960 is the same for BatchRotatingKVCache"
MODULE = "mlx_lm.models.cache"

# Updates that the probe makes.
_PROBES = 8
# The number `offset` itself takes this much.
_NUMBER_SIZE = 4  # bytes


def probe(cache: Any) -> None:
    """Update a fresh cache, and see whether `offset` holds the memory of earlier updates.

    Nothing is evaluated.
    """
    require(
        cache,
        "BatchKVCache.update_and_fetch",
        "BatchKVCache.filter",
        "BatchKVCache.extend",
        "mx.get_active_memory",
    )
    if "offset" in vars(cache.BatchKVCache):
        raise Incompatible("BatchKVCache already has a class attribute offset")
    mx = cache.mx
    token = mx.array([[[[0.0]]]])
    trial = cache.BatchKVCache([0])
    trial.offset = 0
    trial.update_and_fetch(token, token)
    if type(trial.offset) is not int or trial.offset != 1:
        raise Incompatible("BatchKVCache.update_and_fetch does not merely add to offset")
    fresh = cache.BatchKVCache([0])
    for _ in range(_PROBES):
        fresh.update_and_fetch(token, token)
    fresh.keys = fresh.values = None
    with_chain = mx.get_active_memory()
    fresh.offset = None
    held = with_chain - mx.get_active_memory()
    if held <= _NUMBER_SIZE:
        raise Retired(f"after {_PROBES} updates offset holds {held} bytes")


def apply(cache: Any) -> None:
    deferred_offset.install(cache.mx, cache.BatchKVCache, "offset")
    patch.wrap(cache, "BatchKVCache.update_and_fetch", _update_and_fetch)
    for name in ("filter", "extend", "prepare", "finalize", "trim"):
        patch.wrap(cache, f"BatchKVCache.{name}", deferred_offset.settling(cache.mx, "offset"))


def _update_and_fetch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let stock add to a plain 0, and move the array by the result."""
    field = type(instance).offset
    own = instance.__dict__
    array, moved = own.get(field.array), own.get(field.moved, 0)
    instance.offset = 0
    try:
        result = wrapped(*args, **kwargs)
    finally:
        own[field.array], own[field.moved] = array, moved + own[field.array] + own[field.moved]
    return result
