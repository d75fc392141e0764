"""The guards: one file a defect of the stock server, named after the defect. Adding one is a file and a line here.

A guard's module has a docstring that says what goes wrong and how it is answered, and these names:

    UPSTREAM    where the defect is known, such as "mlx-lm 1505"
    MODULE      the module of mlx_lm whose import brings the guard in
    probe(m)    raises NotConfigured where nothing asks for the guard, Retired where this version does not have the defect,
                Incompatible where it cannot be guarded; it may return what the guard cannot do here, in words
    apply(m)    wraps names of that module
    LIVES_BY    where there are any: the facts (shim/engine/facts.py) by which it lives, and what it cannot tell without each;
                its state is computed from them
    SETTINGS    where there are any: the settings that ask for the guard; with none of them set it is off
    REQUIRED    True where no server may start with such a setting unless the guard is at work, or off by its switch

Whether a guard is on is its switch, MLX_SHIM_<NAME>. Guards do not call one another: they share `engine`.
"""

from __future__ import annotations

import importlib


def settings_of(name: str) -> tuple[str, ...]:
    """The settings that ask for the guard; none where it is there for every server."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), "SETTINGS", ())


def is_required(name: str) -> bool:
    """Whether no server may start that asks for the guard and does not get it."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), "REQUIRED", False)
