"""Stock wires all the memory that Metal recommends: macOS cannot take back a byte of it, and has panicked for that.

Here MLX_SHIM_WIRED says how much mlx_lm may wire at most. What it asks for through `mx.set_wired_limit` is held to that
at every one of its call sites; other users of mlx are not. A model near the size of the memory needs wiring to decode
at its speed (43 to 150 times slower without): `auto` and model+SIZE go by the size of the one that is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..core import memory, report, settings
from ..core.verdicts import Incompatible, require
from ..engine.state import engine
from ..models import weights

UPSTREAM = "mlx-lm 883, 1252, 1666; mlx 3186, 3346"
MODULE = "mlx_lm.server"
SETTINGS = ("wired",)
REQUIRED = True

# Where a server calls it: at its start, in every BatchGenerator, around a request that is served alone.
SITES = ("mlx_lm.server", "mlx_lm.generate", "mlx_lm.utils")


def probe(server: Any) -> None:
    require(server, "mx.set_wired_limit", "ModelProvider", "BatchGenerator")
    if _views():
        raise Incompatible("mx is wrapped already")


def apply(server: Any) -> None:
    for site in SITES:
        module = importlib.import_module(site)
        if hasattr(module, "mx"):
            module.mx = _View(module.mx)  # type: ignore[attr-defined]


def _views() -> list[str]:
    return [
        site
        for site in SITES
        if isinstance(getattr(importlib.import_module(site), "mx", None), _View)
    ]


class _View:
    """`mlx.core` as mlx_lm's modules see it: all of it, whatever others change in it, and one function replaced."""

    def __init__(self, mx: Any) -> None:
        object.__setattr__(self, "_mx", mx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._mx, name)

    def set_wired_limit(self, limit: int) -> int:
        """As mx.set_wired_limit, of no more than MLX_SHIM_WIRED allows: bytes, the earlier limit."""
        policy = settings.current.wired
        allowed = (
            limit
            if policy is None
            else min(limit, policy.most(_weight(self._mx), memory.total() or 0))
        )
        if allowed < limit:
            report.once(
                f"mlx_lm may wire {memory.format_bytes(allowed)} rather than {memory.format_bytes(limit)} (MLX_SHIM_WIRED)"
            )
        before: int = self._mx.set_wired_limit(allowed)
        return before


def _weight(mx: Any) -> int:
    """Of the loaded model; 0, as before one is loaded, where it does not tell: stock asks outside any `try`."""
    try:
        return weights.size(engine.provider, mx.array)
    except Exception as error:
        report.once(f"what the model takes cannot be told, and nothing is wired for it: {error!r}")
        return 0
