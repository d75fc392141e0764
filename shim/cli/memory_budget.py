"""What `python -m shim doctor --model MODEL` prints about memory.

What the model takes, what is left, and which settings to use.
"""

from __future__ import annotations

import os

from ..core import settings
from ..core.memory import format_bytes
from ..core.settings import Settings
from ..core.values import AUTO_SHARE
from ..models.kv_cost import ANY_LENGTH, Cost
from ..planning import budget, cache_cost, local_model
from ..planning.budget import Budget

SOFT, HARD, WIRED = (settings.variable(name) for name in ("memory_soft", "memory_hard", "wired"))
_SMALL = 1 << 20


def show(name: str, total: int | None) -> None:
    """Print the budget of a model on a machine of `total` bytes. Raises NotHere."""
    folder = local_model.find(name, os.environ)
    described = local_model.config(folder)
    size = local_model.size(folder)
    in_force, bad, _ = settings.load()
    print(f"\nmemory budget for {name!r}")
    share = f", {size / total:.0%} of the memory" if total else ""
    _row("weights", f"{format_bytes(size)}{share}, in {folder}")
    advised = budget.recommended(total, size) if total else None
    if total:
        _show_wired(total, size, valid=not any(text.startswith(f"{WIRED}=") for text in bad))
        _show_limits(in_force, advised)
    hard = in_force.memory_hard or (advised.hard if advised else 0)
    dtype = local_model.dtype(folder, described)
    try:
        cost = cache_cost.ask(folder, dtype)
    except cache_cost.NotKnown as error:
        _row("a token's cache", f"not known before the first finished request: {error}")
        return
    _row("a token's cache", f"{_bytes(cost.per_token)}, {dtype}{_exceptions(cost)}")
    if hard:
        _show_contexts(cost, hard - size, local_model.longest(described))


def _show_wired(total: int, size: int, *, valid: bool) -> None:
    given = (os.environ.get(WIRED, "").strip() if valid else "") or "stock"
    auto = budget.wired(total, size)
    side, why = (
        ("below", "macOS can take memory back")
        if auto == "off"
        else ("of at least", "unwired it would be slow")
    )
    _row("wiring", f"{WIRED}={given} in force")
    _row("recommended", f"{WIRED}=auto")
    _row("", f"which is {auto} for a model {side} {AUTO_SHARE:.0%} of the memory: {why}")


def _show_limits(in_force: Settings, advised: Budget | None) -> None:
    soft, hard = (
        format_bytes(size) if size else "none"
        for size in (in_force.memory_soft, in_force.memory_hard)
    )
    _row("limits", f"soft {soft}, hard {hard} in force")
    if advised is None:
        _row(
            "recommended", f"none: the model takes more than {budget.MOST_MODEL:.0%} of the memory"
        )
    else:
        _row("recommended", f"{SOFT}={budget.as_setting(advised.soft)}")
        _row("", f"{HARD}={budget.as_setting(advised.hard)}")


def _show_contexts(cost: Cost, room: int, longest: int | None) -> None:
    _row("room below hard", format_bytes(room) if room > 0 else "none: the model alone takes more")
    for tokens in budget.lengths(longest):
        number = budget.how_many(cost, room, tokens)
        fits = "any number" if number is None else number
        _row(f"{tokens // 1024}k tokens", f"{_bytes(cost.bytes_of(tokens))} each, {fits} at a time")
    fit = cost.tokens_within(max(0, room))
    if longest and fit >= longest:
        _row("longest alone", f"{longest} tokens, the most it was made for")
    else:
        _row(
            "longest alone", "any: its caches do not grow" if fit >= ANY_LENGTH else f"{fit} tokens"
        )
    _row("", "a prefill takes room beside the cache, which is not counted")


def _exceptions(cost: Cost) -> str:
    """Say which part of the caches does not grow with each token."""
    constant = sum(layer.constant for layer in cost.layers)
    windows = sorted(
        {
            int(layer.window)
            for layer in cost.layers
            if layer.per_token and layer.window != float("inf")
        }
    )
    told = [f"{_bytes(constant)} whatever the length"] if constant else []
    told += (
        [f"in some layers of no more than {' or '.join(map(str, windows))} tokens"]
        if windows
        else []
    )
    return "".join(f"; {text}" for text in told)


def _bytes(size: float) -> str:
    return format_bytes(size) if size >= _SMALL else f"{size / 1024:.1f} KiB"


def _row(what: str, told: str) -> None:
    print(f"  {what:18}{told}")
