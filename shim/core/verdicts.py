"""The exceptions that give a guard's state, and the look-up of the names of stock that it needs."""

from __future__ import annotations

import inspect
from typing import Any

# Every name of stock that the shim has looked up: (module, dotted path). The tests remove each.
touched: set[tuple[str, str]] = set()


class NotConfigured(Exception):
    """Raised by a probe: no setting asks for the guard. The message names such a setting."""


class Retired(Exception):
    """Raised by a probe: this version does not have the defect. The message says how that shows."""


class Incompatible(Exception):
    """Raised by a probe: a name that the guard needs is not as it expects. The message names it."""


class Refused(Exception):
    """Raised by apply: the guard cannot do what its setting asks for. The message says why."""


def require(module: Any, *paths: str) -> None:
    """Raise Incompatible unless every dotted path exists in `module`.

    A path may end in parameters, as "ResponseGenerator._tokenize(tokenizer, request)" does. These
    must be the function's first parameters, self not counted.
    """
    for path in paths:
        name, _, wanted = path.rstrip(")").partition("(")
        found = find(module, name)
        if wanted:
            _require_parameters(found, path, [word.strip() for word in wanted.split(",")])


def _require_parameters(function: Any, path: str, wanted: list[str]) -> None:
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    given = [name for name in parameters if name != "self"][: len(wanted)]
    if given != wanted:
        raise Incompatible(f"{path} is called with ({', '.join(given)})")


def find(module: Any, path: str) -> Any:
    """Return the object at a dotted path in `module`. Raises Incompatible if there is none."""
    touched.add((module.__name__, path))
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise Incompatible(f"{module.__name__} has no {path}")
        found = getattr(found, name)
    return found


def has(module: Any, path: str) -> bool:
    """Whether there is an object at a dotted path in `module`."""
    try:
        find(module, path)
    except Incompatible:
        return False
    return True
