"""Helpers that the changed sources call at run time.

tests/kit/drift/server.py puts this file next to the changed copy of mlx_lm. `X.name(...)` means
the changed thing only where X is of a class that has it, and an AST does not know the class of X.
So the changed classes carry a mark, `_drift_NAME`. These helpers look it up through X, which is an
instance, a class or a super().
"""

import functools
from typing import Any, NamedTuple

# The value of the further argument.
EXTRA = object()


class Result(NamedTuple):
    """The result of a function whose result has changed its shape."""

    value: Any


def marked(x, name):
    return getattr(x, f"_drift_{name}", None) is True


def new(x, name):
    """The name of the attribute in x."""
    return f"{name}_renamed" if marked(x, name) else name


class Slot:
    """`Slot(x, name).value` reads, sets or deletes the attribute by the name that it has in x."""

    def __init__(self, x, name):
        self.__dict__.update(x=x, name=new(x, name))

    @property
    def value(self):
        return getattr(self.x, self.name)

    @value.setter
    def value(self, value):
        setattr(self.x, self.name, value)

    @value.deleter
    def value(self):
        delattr(self.x, self.name)


def by_name(function, x, name, *rest):
    """Call hasattr, getattr, setattr or delattr with the name that the attribute has in x."""
    return function(x, new(x, name), *rest)


def extra(function, changed):
    return functools.partial(function, EXTRA) if changed else function


def opening(function, changed):
    return (lambda *args, **kwargs: function(*args, **kwargs).value) if changed else function


def taking(function, changed):
    return (lambda *args, **kwargs: next(function(*args, **kwargs))) if changed else function


def bound(how, x, name):
    """The method of x, which can be called as before the change."""
    return how(getattr(x, name), marked(x, name))
