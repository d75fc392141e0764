"""Stock wires all the memory that Metal recommends: macOS cannot take it back, and has panicked.

Here MLX_SHIM_WIRED says how much memory mlx_lm may wire at most. Every call of `mx.set_wired_limit`
in mlx_lm is held to that; other users of mlx are not. A model whose size is near that of the memory
must be wired to decode at its speed (43 to 150 times slower without): the values `auto` and
model+SIZE depend on the size of the loaded model.
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

# The modules that call mx.set_wired_limit: at the server's start, in every BatchGenerator, and
# around a request that is served alone.
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
    """`mlx.core` as mlx_lm's modules see it: with one function replaced, the rest as it is now."""

    def __init__(self, mx: Any) -> None:
        object.__setattr__(self, "_mx", mx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._mx, name)

    def set_wired_limit(self, limit: int) -> int:
        """As mx.set_wired_limit, with at most what MLX_SHIM_WIRED allows. Returns the last limit.

        Both limits are in bytes.
        """
        policy = settings.current.wired
        allowed = limit
        if policy is not None:
            allowed = min(limit, policy.most(_weight(self._mx), memory.total() or 0))
        if allowed < limit:
            report.once(
                f"mlx_lm may wire {memory.format_bytes(allowed)} rather than "
                f"{memory.format_bytes(limit)} (MLX_SHIM_WIRED)"
            )
        before: int = self._mx.set_wired_limit(allowed)
        return before


def _weight(mx: Any) -> int:
    """The bytes of the loaded model; 0 if none is loaded, or if its size is not known.

    Stock calls this outside any `try`, so it must not raise.
    """
    with report.contained("the size of the model is not known, and nothing is wired for it"):
        return weights.size(engine.provider, mx.array)
    return 0
