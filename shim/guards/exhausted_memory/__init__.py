"""The server takes memory until none is left: macOS panics, or kills the server with all requests.

Here MLX_SHIM_MEMORY_SOFT and MLX_SHIM_MEMORY_HARD each set a limit. Once a second the watchdog
compares it with the memory in use: the larger of MLX's own count and the process's footprint.

Above soft the guard frees memory that no request uses: first what MLX and malloc keep, then
entries of the prompt cache. If that is not enough, new requests get 503 `memory_pressure`.

Above hard the guard ends the largest requests with the same error, one after another. A request
that is above hard by itself gets 400. If memory stays above a limit and no request is left that
could free it, the process drains and ends with 75, so that its supervisor replaces it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ...core import memory, patch, report, settings
from ...core.errors import memory_pressure
from ...core.memory import format_bytes
from ...core.verdicts import require
from ...engine import drain, facts, watchdog
from ...engine.state import engine
from .hard import HardLimit
from .limit import Replacement
from .soft import SoftLimit
from .trim import Trimmer

UPSTREAM = "mlx-lm 854, 883, 1390, 1480, 1666; mlx 3186, 3346"
MODULE = "mlx_lm.server"
SETTINGS = ("memory_soft", "memory_hard")
LIVES_BY = {
    "turns": facts.NEEDED,
    "deliveries": "no request can be ended for its memory",
    "steps": "a trim waits for the next turn",
}

LOOK_INTERVAL = 1.0  # seconds
# A limit below this many times the memory with the model loaded leaves nothing to serve with.
LOADED_MARGIN = 1.05


def probe(server: Any) -> None:
    require(
        server,
        "mx.get_active_memory",
        "mx.get_cache_memory",
        "mx.clear_cache",
        "ResponseGenerator._next_request",
        "APIHandler.handle_completion",
        "LRUPromptCache.trim_to",
        "BatchGenerator.next",
    )


def apply(server: Any) -> None:
    soft, hard = settings.current.memory_soft, settings.current.memory_hard
    if soft and hard and soft > hard:
        report.line(
            f"MLX_SHIM_MEMORY_SOFT, {format_bytes(soft)}, is above MLX_SHIM_MEMORY_HARD, "
            f"{format_bytes(hard)}: the lower limit is used for both"
        )
    guard = _Guard(server.mx, min(soft or hard, hard or soft), hard)
    drain.install(server)
    watchdog.add(guard)
    patch.wrap(server, "ResponseGenerator._next_request", guard.next_request)
    patch.wrap(server, "BatchGenerator.next", guard.step)
    patch.wrap(server, "APIHandler.handle_completion", _handle_completion)


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if engine.memory_error is not None and engine.own is None:
        # Each request gets an error of its own. An error that is raised again and again keeps the
        # frames of every time, and the requests in them.
        raise memory_pressure()
    return wrapped(*args, **kwargs)


class _Guard:
    """Judges in the watchdog's thread, and trims in the generation thread.

    Only the generation thread uses the caches, so only that thread may trim them.
    """

    def __init__(self, mx: Any, soft: int, hard: int) -> None:
        self._mx = mx
        self.trimmer = Trimmer(mx)
        replacement = Replacement()
        self.soft = SoftLimit(soft, replacement, self.trimmer)
        self.hard = HardLimit(hard, replacement, mx)
        self._looked = 0.0
        # Whether the limits were compared with the memory that the loaded model takes.
        self._begun = False

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL or not self._begun:
            return
        self._looked = now
        try:
            self._look(now)
        # No free file descriptor, for example: the next look may work.
        except OSError as error:
            report.once(f"memory: what is in use cannot be read: {error!r}")
        except Exception:
            # The watchdog drops a look that fails, and nothing else would end the refusal.
            engine.memory_error = None
            raise

    def _look(self, now: float) -> None:
        usage = engine.memory = self.trimmer.measure(now, self.soft, self.hard)
        self.soft.judge(usage, now, above_hard=self.hard.is_crossed(usage))
        # Only rank 0 knows whose requests they are.
        if self.hard.size and not engine.rank:
            self.hard.judge(usage, now)

    def next_request(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Once a turn of the generation loop; the first has the model loaded and no batch."""
        if self.trimmer.excess or not self._begun:
            self._act()
        return wrapped(*args, **kwargs)

    def step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Once a step of a batch. A batch that is drained for another model has no turns."""
        wanted = self.trimmer.excess and self._begun
        if wanted and threading.current_thread() is engine.generation_thread:
            self._act()
        return wrapped(*args, **kwargs)

    def _act(self) -> None:
        excess, self.trimmer.excess = self.trimmer.excess, 0
        with report.contained("memory"):
            if self._begun:
                self.trimmer.trim(excess, self.soft)
            else:
                self._begin()
        self._begun = True

    def _begin(self) -> None:
        """Drop each limit that the loaded model alone nearly fills.

        Such a limit would refuse all requests, or have the process replaced again and again.
        """
        # At rest: what the load left in MLX's pool and in malloc is not needed to serve.
        usage = memory.at_rest(self._mx)
        for limit in (self.soft, self.hard):
            if limit.size and usage.counted * LOADED_MARGIN >= limit.size:
                engine.ignored_limits.add(limit.setting)
                report.line(
                    f"{settings.variable(limit.setting)}, {format_bytes(limit.size)}, is ignored: "
                    f"with its model loaded the process already uses {format_bytes(usage.counted)}"
                )
                limit.size = 0
        self.soft.size = self.soft.size or self.hard.size
