"""A prompt that cannot fit into memory is started, and takes the server down when it gets there.

Here, where MLX_SHIM_MEMORY_HARD is set, what a token takes is learnt from the caches of finished requests, for the
model that is loaded; before the first one nothing is assumed. A prompt whose cache would cross hard is then refused
before it is started: 400 with the number of tokens that would fit, or 503 if it would fit without the others. Entries
of the prompt cache make room for it.
"""

from __future__ import annotations

from typing import Any

from .. import kv_cost, memory, patch, report, settings
from ..engine import FINISHED, QUEUED, engine
from ..errors import ShimError, memory_pressure
from . import require

UPSTREAM = "mlx-lm 854, 948, 1480; FAILURE_MODES M6"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(
        server, "mx.get_active_memory", "ResponseGenerator._tokenize", "LRUPromptCache.insert_cache",
        "LRUPromptCache.trim_to", "ModelProvider._load",
    )  # fmt: skip


def apply(server: Any) -> None:
    if settings.current.memory_hard:
        guard = _Guard(server.mx)
        patch.wrap(server, "LRUPromptCache.insert_cache", guard.learn)
        patch.wrap(server, "ModelProvider._load", guard.forget)
        patch.wrap(server, "ResponseGenerator._tokenize", guard.tokenize)


class _Guard:
    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._cost: kv_cost.Cost | None = None
        self._overhead: int | None = (
            None  # bytes of the process beside MLX's, with its model up and nothing in the batch
        )

    def forget(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self._cost = None
        return wrapped(*args, **kwargs)

    def learn(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            self._cost = kv_cost.learn(args[2] if len(args) > 2 else kwargs["prompt_cache"])  # noqa: PLR2004
            if self._overhead is None:
                memory.give_back()
                usage = memory.usage(self._mx)
                self._overhead = max(0, usage.footprint - usage.active - usage.pool)
        except Exception as error:  # in the generation thread, outside any try
            report.once(f"what a token takes cannot be learnt: {error!r}")
        return wrapped(*args, **kwargs)

    def tokenize(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Where what it raises goes to this request alone."""
        result = wrapped(*args, **kwargs)
        if self._cost is not None and not engine.distributed:  # other ranks would go on without us
            self._admit(self._cost, instance, len(result[0]))
        return result

    def _admit(self, cost: kv_cost.Cost, generator: Any, tokens: int) -> None:
        """Each sequence of a batch takes as much as the longest, and an answer is held twice while it is put away."""
        hard, cached = settings.current.memory_hard, generator.prompt_cache.nbytes
        others = [
            max(e.total, e.processed) + e.tokens
            for e in list(engine.entries.values())
            if e.phase not in (QUEUED, FINISHED) and not e.stopped
        ]
        batch = engine.batch()
        running = batch.prompt_cache_nbytes if batch is not None else 0
        fixed = self._mx.get_active_memory() - cached - running + (self._overhead or 0)
        alone = fixed + cost.bytes_of(tokens)
        together = fixed + (len(others) + 1) * cost.bytes_of(max([*others, tokens]))
        if alone > hard:
            fit = cost.tokens_within(hard - fixed)
            raise ShimError(
                400, "context_length_exceeded",
                f"the prompt has {tokens} tokens, for which there is not enough memory; accepted: {fit} "
                "(MLX_SHIM_MEMORY_HARD)",
            )  # fmt: skip
        if together > hard:
            raise memory_pressure()
        generator.prompt_cache.trim_to(n_bytes=hard - together)
