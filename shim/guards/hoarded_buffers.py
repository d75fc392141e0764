"""MLX keeps the memory of freed arrays for the next ones, as much as there ever was of it, and nothing bounds that.

Here MLX_SHIM_CACHE_LIMIT and MLX_SHIM_MEMORY_LIMIT go to `mx.set_cache_limit` and `mx.set_memory_limit` before the first
model is loaded. The first bounds what is kept. The second is a guideline: above it MLX gives back what it has kept
before it takes more, and takes more all the same.
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
            try:
                before = getattr(server.mx, name)(size)
                report.once(
                    f"mx.{name} is {memory.format_bytes(size)}, it was {memory.format_bytes(before)}"
                )
            except Exception as error:  # the server starts all the same
                report.line(f"mx.{name}({size}) failed: {error!r}")
        return wrapped(*args, **kwargs)

    patch.wrap(server, "ResponseGenerator.__init__", starts)


def _wanted() -> dict[str, int]:
    """Bytes, by the function of mlx.core that takes them; 0 is a limit as well."""
    limits = {
        "set_memory_limit": settings.current.memory_limit,
        "set_cache_limit": settings.current.cache_limit,
    }
    return {name: size for name, size in limits.items() if size is not None}
