"""Reads the settings from the environment variables.

The variables are the kill switch, the fields of `Settings` and a switch for each guard.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .catalogue import GUARDS
from .settings_table import Settings
from .values import OFF, ON, parse_switch

__all__ = [
    "KILL_SWITCH",
    "PREFIX",
    "Row",
    "Settings",
    "current",
    "in_force",
    "is_set",
    "load",
    "table",
    "variable",
]

PREFIX = "MLX_SHIM"
KILL_SWITCH = PREFIX


@dataclass(frozen=True)
class Row:
    """One variable, as the documentation and `doctor` list it."""

    variable: str
    kind: str
    default: str
    meaning: str


def table() -> list[Row]:
    """List every variable: the kill switch, the settings, then a switch for each guard."""
    rows = [
        Row(
            KILL_SWITCH,
            "switch",
            "1",
            "the kill switch: 0 leaves Python as if the folder were not on PYTHONPATH",
        )
    ]
    for f in fields(Settings):
        if f.metadata:
            meta = f.metadata
            rows.append(Row(variable(f.name), meta["kind"], meta["default"], meta["meaning"]))
    rows += [Row(variable(name), "switch", "1", f"0 turns the guard {name} off") for name in GUARDS]
    return rows


def variable(name: str) -> str:
    """Return the environment variable of a setting or a guard."""
    return f"{PREFIX}_{name.upper()}"


def load(environ: Mapping[str, str] = os.environ) -> tuple[Settings, list[str], list[str]]:
    """Read the settings from `environ`.

    Returns the settings, a line for each value that cannot be parsed, and a line for each variable
    that does not exist.
    """
    values: dict[str, Any] = {}
    off: set[str] = set()
    bad: list[str] = []

    def read(name: str, parse: Callable[[str], Any], default: str) -> Any:
        raw = environ.get(variable(name), "")
        if not raw.strip():
            return parse(default)
        try:
            return parse(raw)
        except ValueError as error:
            bad.append(
                f"{variable(name)}={raw!r} is not valid; {error}; using the default {default}"
            )
            return parse(default)

    for f in fields(Settings):
        if f.metadata:
            values[f.name] = read(f.name, f.metadata["parse"], f.metadata["default"])
    for guard in GUARDS:
        if not read(guard, parse_switch, "1"):
            off.add(guard)
    raw = environ.get(KILL_SWITCH, "")
    if raw.strip() and raw.strip().lower() not in (*ON, *OFF):
        accepted = ", ".join((*ON, *OFF))
        bad.append(f"{KILL_SWITCH}={raw!r} is not valid; accepted: {accepted}; the shim stays on")
    known = [row.variable for row in table()]
    unknown = [
        f"{name} is not a setting of the shim; "
        f"the nearest known name is {difflib.get_close_matches(name, known, 1, 0)[0]}"
        for name in sorted(environ)
        if name.startswith(PREFIX + "_") and name not in known
    ]
    return Settings(**values, guards_off=frozenset(off)), bad, unknown


# The settings in force.
current: Settings = Settings()


def in_force(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """List each variable that differs from its default, with its value as the user wrote it.

    The value of a file is only "set": a user may have put a secret there by mistake.
    """
    found = []
    for f in fields(Settings):
        given = environ.get(variable(f.name), "").strip() if f.metadata else ""
        if given and getattr(current, f.name) != f.default:
            found.append((variable(f.name), "set" if f.metadata["kind"] == "file" else given))
    return found


def is_set(name: str) -> bool:
    """Whether a setting asks for anything.

    0 and an empty value do not, unless the default is stock's own value: then 0 asks for 0.
    """
    default = next(f.default for f in fields(Settings) if f.name == name)
    value = getattr(current, name)
    return bool(value) or (default is None and value is not None)
