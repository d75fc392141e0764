"""Lets a probe run a stock function without a server, to see whether it has the defect."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any


def of(function: Any, **names: Any) -> Callable[..., Any]:
    """A copy of a stock function without its wrappers, with `names` in place of its module's own.

    With `logging=Anything()` it does not touch the logging of a program that is still starting: the
    first call of `logging.debug` would set that up.
    """
    stock = inspect.unwrap(function)
    copy = types.FunctionType(
        stock.__code__,
        {**stock.__globals__, **names},
        stock.__name__,
        stock.__defaults__,
        stock.__closure__,
    )
    copy.__kwdefaults__ = stock.__kwdefaults__
    return copy


class Anything:
    """Stands for any object that does not matter: it has all attributes, is callable and empty."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())
