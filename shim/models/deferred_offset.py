"""An attribute that holds an array and counts what is added to it as a Python integer.

`x = x + n` on an mx.array makes a node that keeps x and a buffer for n alive until the result is
evaluated. Caches do that once a token, and an array that no layer reads is never evaluated: the
nodes form a chain that grows.
"""

from __future__ import annotations

from typing import Any

from ..core import patch


class Deferred:
    """A data descriptor: the array that was last assigned, and the integer added to it since.

    A reader gets the sum. The sum is not stored, so it lives only as long as the reader keeps it.
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
        """Add `n` to the value that a reader gets, if there is an array."""
        if cache.__dict__.get(self.array) is not None:
            cache.__dict__[self.moved] += n


def install(mx: Any, owner: type, *names: str) -> None:
    """Make these attributes of `owner` deferred. Copies and pickles have them as stock does."""
    for name in names:
        setattr(owner, name, Deferred(name))

    def getstate(cache: Any) -> dict[str, Any]:
        own = {key: value for key, value in cache.__dict__.items() if not key.startswith("_shim_")}
        values = {name: getattr(cache, name) for name in names}
        # Otherwise a copy of a copy would be a chain.
        mx.async_eval([value for value in values.values() if value is not None])
        return own | values

    def setstate(cache: Any, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(cache, key, value)

    owner.__getstate__ = getstate  # type: ignore[attr-defined]
    owner.__setstate__ = setstate  # type: ignore[attr-defined]


def settling(mx: Any, *names: str) -> patch.Wrapper:
    """A wrapper for functions that rebuild these attributes when a batch changes.

    It starts their evaluation, so that their inputs can be freed.
    """

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        arrays = [instance.__dict__.get(f"_shim_{name}") for name in names]
        mx.async_eval([array for array in arrays if array is not None])
        return result

    return wrapper
