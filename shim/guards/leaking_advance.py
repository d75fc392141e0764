"""Every `ArraysCache.advance` leaks a buffer, and Metal fails at 499,000 buffers.

Active memory hardly grows meanwhile. `advance(N)` sets `lengths` and `left_padding` to a lazy
difference, whose scalar operand N owns a buffer. Decode evaluates the mask of one
linear-attention layer. In every other such layer the chain grows by a live buffer a token: a
model with 48 of them dies after about 10,617 tokens of one completion.

Here `advance` adds to Python integers, one for each field. The fields do not share one: models
read `lengths` in every layer and step, and each read would then also settle `left_padding`.
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import Incompatible, Retired, require
from ..models import deferred_offset

UPSTREAM = "mlx-lm 1845, 1632, 1641, 1642"
MODULE = "mlx_lm.models.cache"

FIELDS = ("left_padding", "lengths")
# Calls of advance that the probe makes.
_PROBES = 8


def probe(cache: Any) -> None:
    """Advance a fresh cache, and see whether active memory grows. Nothing is evaluated."""
    require(
        cache,
        "ArraysCache.advance",
        "ArraysCache.filter",
        "ArraysCache.extend",
        "mx.get_active_memory",
    )
    if any(field in vars(cache.ArraysCache) for field in FIELDS):
        raise Incompatible("ArraysCache already has a class attribute left_padding or lengths")
    fresh = cache.ArraysCache(1, left_padding=[0])
    if not isinstance(fresh.left_padding, cache.mx.array):
        raise Incompatible("a fresh ArraysCache has no left_padding to advance")
    before = cache.mx.get_active_memory()
    for _ in range(_PROBES):
        fresh.advance(1)
    grown = cache.mx.get_active_memory() - before
    if grown == 0:
        raise Retired(f"{_PROBES} calls of advance hold no memory")
    if grown < _PROBES:
        raise Incompatible(
            f"active memory changed by {grown} bytes in {_PROBES} calls of advance: "
            "that tells nothing"
        )


def apply(cache: Any) -> None:
    deferred_offset.install(cache.mx, cache.ArraysCache, *FIELDS)
    patch.wrap(cache, "ArraysCache.advance", _advance)
    for name in ("filter", "extend"):
        patch.wrap(cache, f"ArraysCache.{name}", deferred_offset.settling(cache.mx, *FIELDS))


def _advance(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # Once a token and layer: no patch.given, which takes longer.
    n = args[0] if args else kwargs.get("N")
    if type(n) is not int:
        # An array: stock's own subtraction, through the fields.
        return wrapped(*args, **kwargs)
    for name in FIELDS:
        getattr(type(instance), name).move(instance, -n)
    return None
