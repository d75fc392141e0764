"""What a probe raises where its guard cannot be active, and the look at the names of stock that a guard needs."""

from __future__ import annotations

import inspect
from typing import Any

# Every name of stock that the shim has asked for: (module, dotted path). The tests take each away.
touched: set[tuple[str, str]] = set()


class NotConfigured(Exception):
    """Raised by a probe: nothing asks for what the guard does, and what would."""


class Retired(Exception):
    """Raised by a probe: the defect is not there (any more), and why one can tell."""


class Incompatible(Exception):
    """Raised by a probe: the names the guard needs are not as it knows them, and which."""


class Refused(Exception):
    """Raised by apply: what the guard's setting asks for cannot be given, and why."""


def require(module: Any, *paths: str) -> None:
    """Raise Incompatible unless every dotted path exists in `module`.

    A path may end in the
    parameters that a call is read by, "ResponseGenerator._tokenize(tokenizer, request)": the function's first ones,
    without self, must be those.
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
    """What is at a dotted path in `module`. Raises Incompatible where there is nothing."""
    touched.add((module.__name__, path))
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise Incompatible(f"{module.__name__} has no {path}")
        found = getattr(found, name)
    return found


def has(module: Any, path: str) -> bool:
    """Whether there is something at the path."""
    try:
        find(module, path)
    except Incompatible:
        return False
    return True
