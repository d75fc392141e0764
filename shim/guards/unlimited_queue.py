"""Any number of requests is accepted, each with a thread, and each waits behind all the others.

Here, where MLX_SHIM_MAX_INFLIGHT is set, a request above that number gets 429 with Retry-After.
"""

from __future__ import annotations

import threading
from typing import Any

from ..core import patch, settings
from ..core.errors import ShimError
from ..core.verdicts import require
from ..engine.state import engine

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2"
MODULE = "mlx_lm.server"
SETTINGS = ("max_inflight",)

# A place is free as soon as any of the other requests ends.
RETRY_AFTER = 1  # seconds


def probe(server: Any) -> None:
    require(server, "APIHandler.handle_completion")


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler.handle_completion", _Places(settings.current.max_inflight))


class _Places:
    """A wrapper that admits so many requests at a time."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._free = threading.Semaphore(places)

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if engine.own is not None:
            return wrapped(*args, **kwargs)
        if not self._free.acquire(blocking=False):
            raise ShimError(
                429,
                "too_many_requests",
                f"{self.places} requests are in flight (MLX_SHIM_MAX_INFLIGHT)",
                RETRY_AFTER,
            )
        try:
            return wrapped(*args, **kwargs)
        finally:
            self._free.release()
