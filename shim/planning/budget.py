"""How much memory a server may use besides its model. The shares were not tried on a Mac."""

from __future__ import annotations

from typing import NamedTuple

from ..core import values
from ..models.kv_cost import Cost

# Share of the machine's memory. With a larger model no limit leaves room to serve.
MOST_MODEL = 0.8
# A share of what the model leaves free, and at most a share of the machine's memory. The system and
# the prefills of a step need the rest.
SOFT_SHARE, SOFT_MOST = 0.6, 0.85
HARD_SHARE, HARD_MOST = 0.75, 0.9
# The limits where the model's size is not known.
SOFT_UNKNOWN, HARD_UNKNOWN = "70%", "80%"
# Lengths of contexts, each in units of 1,024 tokens.
LENGTHS = (8, 32, 128, 256)

_MIB = 1 << 20


class Budget(NamedTuple):
    """Bytes, in whole MiB, for MLX_SHIM_MEMORY_SOFT and MLX_SHIM_MEMORY_HARD."""

    soft: int
    hard: int


def recommended(total: int, model: int) -> Budget | None:
    """The limits for a machine and a model of so many bytes; None if it leaves too little."""
    if model > MOST_MODEL * total:
        return None
    left = total - model
    return Budget(
        _whole(min(model + SOFT_SHARE * left, SOFT_MOST * total)),
        _whole(min(model + HARD_SHARE * left, HARD_MOST * total)),
    )


def as_setting(size: int) -> str:
    """Bytes as a setting takes them, such as 43417M, rounded down to a MiB."""
    return f"{size // _MIB}M"


def wired(total: int, model: int) -> str:
    """The value that MLX_SHIM_WIRED=auto stands for: off, or model+4G."""
    auto = values.parse_wired("auto")
    return (
        "off"
        if auto is not None and not auto.most(model, total)
        else f"model+{values.AUTO_MARGIN >> 30}G"
    )


def lengths(longest: int | None) -> list[int]:
    """The contexts to list, in tokens, for a model that takes at most `longest`."""
    return [1024 * length for length in LENGTHS if longest is None or 1024 * length <= longest]


def how_many(cost: Cost, room: int, tokens: int) -> int | None:
    """How many caches of so many tokens fit into `room` bytes; None if a cache takes no memory."""
    size = cost.bytes_of(tokens)
    return max(0, room) // size if size else None


def _whole(size: float) -> int:
    return int(size) // _MIB * _MIB
