"""The guards: one file a defect of the stock server, named after the defect. Adding one is a file and a line here.

A guard's module has a docstring that says what goes wrong and how it is answered, and these names:

    UPSTREAM    where the defect is known, such as "mlx-lm 1505"
    MODULE      the module of mlx_lm whose import brings the guard in
    probe(m)    raises Unasked where nothing asks for the guard, Retired where this version does not have the defect,
                Incompatible where it cannot be guarded; it may return what the guard cannot do here, in words
    apply(m)    wraps names of that module
    LIVES_BY    where there are any: the facts (shim/facts.py) by which it lives, and what it cannot tell without each;
                its state is computed from them
    SETTINGS    where there are any: the settings that ask for the guard; with none of them set it is off
    REQUIRED    True where no server may start with such a setting unless the guard is at work, or off by its switch

Whether a guard is on is its switch, MLX_SHIM_<NAME>. Guards do not call one another: they share `engine`.
"""

from __future__ import annotations

import importlib

from ..verdicts import Incompatible, Refused, Retired, Unasked, require

__all__ = ["GUARDS", "HEART", "Incompatible", "Refused", "Retired", "Unasked", "is_required", "require", "settings_of"]

GUARDS = (
    "generation_death",
    "orphaned_process",
    "abandoned_request",
    "stall",
    "frozen_interpreter",
    "nested_xtc_tokens",
    "killer_request",
    "unlimited_tokens",
    "unlimited_queue",
    "error_status",
    "bad_request",
    "unbounded_body",
    "slow_client",
    "shared_fault",
    "untruthful_health",
    "arrays_cache",
    "batch_offset",
    "pinned_batch",
    "overfull_prompt_cache",
    "leftover_cache",
    "unreturned_weights",
    "forged_fetch",
    "overlong_key",
    "exact_cache_hit",
    "mixed_processors",
    "quadratic_search",
    "usage_option",
    "models_listing",
    "open_door",
    "dropped_model",
    "needless_drain",
    "any_model",
    "endless_wait",
    "abrupt_stop",
    "grown_process",
    "overwired_memory",
    "hoarded_buffers",
    "exhausted_memory",
    "unaffordable_prompt",
    "unseen_by_systemd",
    "crash_loop",
    "refused_while_down",
)
# What the promise stands on: the server answers, says that it cannot, or exits. Without one of these that is not so.
HEART = ("generation_death", "stall", "endless_wait", "frozen_interpreter", "untruthful_health", "abrupt_stop")


def settings_of(name: str) -> tuple[str, ...]:
    """The settings that ask for the guard; none where it is there for every server."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), "SETTINGS", ())


def is_required(name: str) -> bool:
    """Whether no server may start that asks for the guard and does not get it."""
    return getattr(importlib.import_module(f"{__name__}.{name}"), "REQUIRED", False)
