"""What the sources that tests/kit/drift/mutate.py changes call at run time: it lies beside the changed copy of mlx_lm.

`X.name(...)` means the changed thing only where X is of a class that has it, and an AST does not know the class of X.
The changed classes carry a mark, `_drift_NAME`, which is looked up here through X: an instance, a class or a super().
"""

import functools
from typing import Any, NamedTuple

EXTRA = object()  # the further argument


class Result(NamedTuple):
    """What a function returns whose result is another thing now."""

    value: Any


def marked(x, name):
    return getattr(x, f"_drift_{name}", None) is True


def new(x, name):
    """What the attribute is called in x."""
    return f"{name}_renamed" if marked(x, name) else name


class Slot:
    """`Slot(x, name).value` is the attribute under the name that it has in x, to be read, set or deleted."""

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
    """hasattr, getattr, setattr or delattr of the attribute under the name that it has in x."""
    return function(x, new(x, name), *rest)


def extra(function, changed):
    return functools.partial(function, EXTRA) if changed else function


def opening(function, changed):
    return (lambda *args, **kwargs: function(*args, **kwargs).value) if changed else function


def taking(function, changed):
    return (lambda *args, **kwargs: next(function(*args, **kwargs))) if changed else function


def bound(how, x, name):
    """The method of x, to be called as before it was changed."""
    return how(getattr(x, name), marked(x, name))
