"""An attribute that holds an array and moves by Python integers, without a chain of lazy operations behind it.

`x = x + n` on an mx.array makes a node that keeps x and a buffer for n alive until somebody evaluates it. Caches do that
once a token, and nobody evaluates what no layer reads.
"""

from __future__ import annotations

from typing import Any

from ..core import patch


class Deferred:
    """A data descriptor: the array as it was last assigned, and how far it has moved since.

    Whoever reads gets the sum, which is not stored: it goes with its reader.
    """

    def __init__(self, name: str) -> None:
        self.array = f"_shim_{name}"
        self.moved = f"_shim_{name}_moved"

    def __get__(self, cache: Any, owner: Any = None) -> Any:
        if cache is None:
            return self
        array = cache.__dict__.get(self.array)
        moved = cache.__dict__.get(self.moved, 0)
        return array + moved if array is not None and moved else array

    def __set__(self, cache: Any, value: Any) -> None:
        cache.__dict__[self.array] = value
        cache.__dict__[self.moved] = 0

    def move(self, cache: Any, n: int) -> None:
        """Add `n` to what a reader gets, if there is an array."""
        if cache.__dict__.get(self.array) is not None:
            cache.__dict__[self.moved] += n


def install(mx: Any, owner: type, *names: str) -> None:
    """Make these attributes of `owner` deferred. Copies and pickles have the attributes of the stock class."""
    for name in names:
        setattr(owner, name, Deferred(name))

    def getstate(cache: Any) -> dict[str, Any]:
        own = {key: value for key, value in cache.__dict__.items() if not key.startswith("_shim_")}
        values = {name: getattr(cache, name) for name in names}
        mx.async_eval(
            [value for value in values.values() if value is not None]
        )  # else a copy of a copy is a chain
        return own | values

    def setstate(cache: Any, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(cache, key, value)

    owner.__getstate__ = getstate  # type: ignore[attr-defined]
    owner.__setstate__ = setstate  # type: ignore[attr-defined]


def settling(mx: Any, *names: str) -> patch.Wrapper:
    """Around what rebuilds these attributes when a batch changes: start their evaluation, so that their inputs can go."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        arrays = [instance.__dict__.get(f"_shim_{name}") for name in names]
        mx.async_eval([array for array in arrays if array is not None])
        return result

    return wrapper
