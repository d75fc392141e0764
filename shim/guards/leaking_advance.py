"""Every `ArraysCache.advance` leaks a buffer, and Metal dies at 499,000 of them, memory flat.

`advance(N)` rebinds `lengths` and `left_padding` to a lazy `x - N`, whose scalar operand owns a buffer. Decode evaluates
the mask of one linear-attention layer; in every other one the chain grows by a live buffer a token, so a model with 48
of them dies after about 10,617 tokens of one completion. Here `advance` moves Python integers, one for each field
(models read `lengths` in every layer and step: with a shared one, reading it would fold the other).
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import Incompatible, Retired, require
from ..models import deferred_offset

UPSTREAM = "mlx-lm 1845, 1632, 1641, 1642"
MODULE = "mlx_lm.models.cache"

FIELDS = ("left_padding", "lengths")
_PROBES = 8  # calls of advance


def probe(cache: Any) -> None:
    """A few advances on a fresh cache, and whether active memory grew. Nothing is evaluated for it."""
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
            f"active memory changed by {grown} bytes in {_PROBES} calls of advance: that tells nothing"
        )


def apply(cache: Any) -> None:
    deferred_offset.install(cache.mx, cache.ArraysCache, *FIELDS)
    patch.wrap(cache, "ArraysCache.advance", _advance)
    for name in ("filter", "extend"):
        patch.wrap(cache, f"ArraysCache.{name}", deferred_offset.settling(cache.mx, *FIELDS))


def _advance(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    n = args[0] if args else kwargs.get("N")
    if type(n) is not int:
        return wrapped(*args, **kwargs)  # an array: stock's own subtraction, through the fields
    for name in FIELDS:
        getattr(type(instance), name).move(instance, -n)
    return None
