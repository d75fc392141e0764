"""MLX keeps the memory of freed arrays for later arrays, without a limit on how much it keeps.

Here MLX_SHIM_CACHE_LIMIT and MLX_SHIM_MEMORY_LIMIT are given to `mx.set_cache_limit` and
`mx.set_memory_limit` before the first model is loaded. The first limits what MLX keeps. The
second is a guideline: above it MLX first gives back what it keeps, and then still takes more.
"""

from __future__ import annotations

from typing import Any

from ..core import memory, patch, report, settings
from ..core.verdicts import require

UPSTREAM = "mlx-lm 828"
MODULE = "mlx_lm.server"
SETTINGS = ("memory_limit", "cache_limit")


def probe(server: Any) -> None:
    require(server, "mx.set_cache_limit", "mx.set_memory_limit", "ResponseGenerator.__init__")


def apply(server: Any) -> None:
    wanted = _wanted()

    def starts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        for name, size in wanted.items():
            with report.contained(f"mx.{name}({size}) failed", tell=report.line):
                before = memory.format_bytes(getattr(server.mx, name)(size))
                report.once(f"mx.{name} is {memory.format_bytes(size)}, it was {before}")
        return wrapped(*args, **kwargs)

    patch.wrap(server, "ResponseGenerator.__init__", starts)


def _wanted() -> dict[str, int]:
    """The limits that are set, in bytes, by the function of mlx.core for each; 0 is a limit too."""
    limits = {
        "set_memory_limit": settings.current.memory_limit,
        "set_cache_limit": settings.current.cache_limit,
    }
    return {name: size for name, size in limits.items() if size is not None}
