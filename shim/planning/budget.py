"""How much memory a server may use on a machine, beside what its model takes. Figures of ours, tried on no Mac."""

from __future__ import annotations

from typing import NamedTuple

from ..core import values
from ..models.kv_cost import Cost

MOST_MODEL = 0.8  # of the machine's memory: with a larger model no limit leaves room to serve
# Of what the model leaves, and of the machine at most: the system and the prefills of a step need the rest.
SOFT_SHARE, SOFT_MOST = 0.6, 0.85
HARD_SHARE, HARD_MOST = 0.75, 0.9
# Where the model's size is not known.
SOFT_UNKNOWN, HARD_UNKNOWN = "70%", "80%"
LENGTHS = (8, 32, 128, 256)  # thousands of tokens, of 1,024

_MIB = 1 << 20


class Budget(NamedTuple):
    """Bytes, of whole MiB, for MLX_SHIM_MEMORY_SOFT and MLX_SHIM_MEMORY_HARD."""

    soft: int
    hard: int


def recommended(total: int, model: int) -> Budget | None:
    """For a machine and a model of so many bytes; None where the model leaves too little to recommend anything."""
    if model > MOST_MODEL * total:
        return None
    left = total - model
    return Budget(
        _whole(min(model + SOFT_SHARE * left, SOFT_MOST * total)),
        _whole(min(model + HARD_SHARE * left, HARD_MOST * total)),
    )


def as_setting(size: int) -> str:
    """Bytes as a setting takes them, such as 43417M; less than a MiB is dropped."""
    return f"{size // _MIB}M"


def wired(total: int, model: int) -> str:
    """What MLX_SHIM_WIRED=auto comes to, as another value of it: off, or model+4G."""
    auto = values.parse_wired("auto")
    return (
        "off"
        if auto is not None and not auto.most(model, total)
        else f"model+{values.AUTO_MARGIN >> 30}G"
    )


def lengths(longest: int | None) -> list[int]:
    """Contexts to tell about, in tokens, of a model that takes at most `longest`."""
    return [1024 * length for length in LENGTHS if longest is None or 1024 * length <= longest]


def how_many(cost: Cost, room: int, tokens: int) -> int | None:
    """Sequences of so many tokens whose caches take no more than `room` bytes together; None where they take nothing."""
    size = cost.bytes_of(tokens)
    return max(0, room) // size if size else None


def _whole(size: float) -> int:
    return int(size) // _MIB * _MIB
