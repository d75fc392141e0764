"""Chooses MLX_SHIM_MEMORY_SOFT and MLX_SHIM_MEMORY_HARD for a unit, by machine and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..core import settings, values
from ..core.memory import format_bytes
from ..planning import budget, local_model
from .invocation import DRAFT, MODEL, option

SOFT, HARD = (settings.variable(name) for name in ("memory_soft", "memory_hard"))
# Soft is at most this share of hard. Between the two, the shim refuses new requests and trims
# caches.
SOFT_OF_HARD = 0.9


class Limits(NamedTuple):
    """The variables for the environment, and a note about them."""

    environ: dict[str, str]
    note: str


def limits(argv: Sequence[str], environ: Mapping[str, str], total: int | None) -> Limits:
    """The limits for a server command on a machine of `total` bytes.

    A limit that `environ` has, 0 included, stays as it is.
    """
    wanted = [name for name in (SOFT, HARD) if name not in environ]
    if not wanted:
        return Limits({}, "")
    size = _size(argv, environ)
    if total is None or size is None:
        chosen = {SOFT: budget.SOFT_UNKNOWN, HARD: budget.HARD_UNKNOWN}
        why = "shares of the machine's memory, since the size of the model is not known here"
    else:
        advised = budget.recommended(total, size)
        if advised is None:
            return Limits(
                {},
                f"no {' and no '.join(wanted)}:"
                f" the model has {format_bytes(size)}, which leaves too little",
            )
        chosen = {SOFT: budget.as_setting(advised.soft), HARD: budget.as_setting(advised.hard)}
        why = f"from a model of {format_bytes(size)} and this machine's {format_bytes(total)}"
    added = {name: chosen[name] for name in wanted}
    if len(added) == 1:
        try:
            why += _fit(added, environ)
        except _LeftOut as left_out:
            return Limits({}, str(left_out))
    told = ", ".join(f"{name}={value}" for name, value in added.items())
    off = " ".join(f"--env {name}=0" for name in added)
    return Limits(added, f"{told}: {why}; not tried on a Mac. Off with {off} (docs/memory.md)")


class _LeftOut(Exception):
    """A limit does not fit the other one, which is given. The message says why."""


def _fit(added: dict[str, str], environ: Mapping[str, str]) -> str:
    """Fit the one limit that is added to the one that is given, and return a note.

    The shim must refuse requests before it ends one. Raises _LeftOut.
    """
    (name,) = added
    other = SOFT if name == HARD else HARD
    given, computed = _bytes(environ[other]), _bytes(added[name])
    if not given:
        return ""
    if name == SOFT and computed > (most := int(given * SOFT_OF_HARD)):
        added[SOFT] = budget.as_setting(most)
        return f", held to {SOFT_OF_HARD:.0%} of the {other}={environ[other]} that is given"
    if name == HARD and computed <= given:
        raise _LeftOut(
            f"no {HARD}: {added[HARD]}, which it would be, is not above the given"
            f" {other}={environ[other]}"
        )
    return ""


def _bytes(value: str) -> int:
    """The bytes of a setting; 0 where it is off or invalid. `environ.doubts` tells the latter."""
    try:
        return values.parse_memory(value)
    except ValueError:
        return 0


def _size(argv: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Bytes of the model and the draft model in the command; None if one is not whole here."""
    if option(argv, *MODEL) is None:
        return None
    named = [
        found[1] for found in (option(argv, *MODEL), option(argv, *DRAFT)) if found is not None
    ]
    try:
        return sum(local_model.size(local_model.find(name, environ)) for name in named)
    except local_model.NotHere:
        return None
