"""The guards: one file for each defect of the stock server, named after the defect.

To add a guard, add its file here and its name to the list in shim/core/catalogue.py. A guard's
module has a docstring that says what goes wrong and what the guard does, and these names:

    UPSTREAM    where the defect is known, such as "mlx-lm 1505"
    MODULE      the module of mlx_lm whose import brings the guard in
    probe(m)    raises NotConfigured where no setting asks for the guard, Retired where this version
                does not have the defect, Incompatible where the guard cannot work; it may return,
                in words, what the guard cannot do here
    apply(m)    wraps names of that module
    LIVES_BY    optional: the facts (shim/engine/facts.py) that the guard needs, and what it cannot
                tell without each; its state is computed from them
    SETTINGS    optional: the settings that ask for the guard; with none of them set it is off
    REQUIRED    optional: True where no server may start with such a setting unless the guard is
                active, or turned off by its switch

The switch of a guard is MLX_SHIM_<NAME>. Guards do not call one another: they share `engine`.
"""

from __future__ import annotations

import importlib


def settings_of(name: str) -> tuple[str, ...]:
    """The settings that ask for the guard; none where every server has it."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), "SETTINGS", ())


def is_required(name: str) -> bool:
    """Whether a server that asks for the guard may not start without it."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), "REQUIRED", False)
