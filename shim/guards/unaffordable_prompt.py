"""A prompt that cannot fit into memory is started, and takes the server down when it gets there.

Here, where MLX_SHIM_MEMORY_HARD is set, what a token takes is learnt from the caches of finished requests, for the
model that is loaded; before the first one nothing is assumed. A prompt whose cache would cross hard is then refused
before it is started: 400 with the number of tokens that would fit, or 503 if it would fit without the others. Entries
of the prompt cache make room for it.
"""

from __future__ import annotations

import math
from typing import Any

from ..core import memory, patch, report, settings
from ..core.errors import ShimError, memory_pressure
from ..core.verdicts import require
from ..engine.entries import FINISHED, QUEUED
from ..engine.state import engine
from ..models import insert_arguments, kv_cost, weights

UPSTREAM = "mlx-lm 854, 948, 1480"
MODULE = "mlx_lm.server"
SETTINGS = ("memory_hard",)


def probe(server: Any) -> None:
    require(
        server, "mx.get_active_memory", "ResponseGenerator._tokenize(tokenizer, request, args)",
        "LRUPromptCache.insert_cache(model, tokens, prompt_cache)", "LRUPromptCache.trim_to", "ModelProvider._load",
    )  # fmt: skip


def apply(server: Any) -> None:
    guard = _Guard(server.mx)
    patch.wrap(server, "LRUPromptCache.insert_cache", guard.learn)
    patch.wrap(server, "ModelProvider._load", guard.forget)
    patch.wrap(server, "ResponseGenerator._tokenize", guard.tokenize)


def _may_shrink(caches: Any) -> bool:
    """Whether a longer one takes less a token, so that this one does not tell.

    With --kv-bits (served alone, from 0.32 on) those past --quantized-kv-start are quantized.
    """
    bits = getattr(engine.arguments, "kv_bits", None)
    return bits is not None and any(hasattr(cache, "to_quantized") for cache in caches)


class _Guard:
    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._cost: kv_cost.Cost | None = None
        self._fixed = (
            math.inf
        )  # bytes: the least there was with this model beside the caches of requests
        self._weights: int | None = (
            None  # bytes: it cannot be less, though caches that share arrays are counted twice
        )
        self._overhead: int | None = (
            None  # bytes of the process beside MLX's, once it has generated something
        )

    def forget(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self._cost, self._fixed, self._weights = None, math.inf, None
        return wrapped(*args, **kwargs)

    def learn(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            caches = insert_arguments.entry_of(args, kwargs)
            if caches and instance is engine.prompt_cache and not _may_shrink(caches):
                self._cost = kv_cost.learn(caches)
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
        if self._cost is None or "memory_hard" in engine.ignored_limits:
            return result
        # Other ranks would go on without us, and another generator may have another model.
        if instance is engine.generator and not engine.distributed:
            try:
                self._admit(self._cost, len(result[0]))
            except ShimError:
                raise
            except Exception as error:
                report.once(f"what a prompt would take cannot be told: {error!r}")
        return result

    def _admit(self, cost: kv_cost.Cost, tokens: int) -> None:
        hard, cached, batch = (
            settings.current.memory_hard,
            engine.prompt_cache.nbytes,
            engine.batch(),
        )
        running = batch.prompt_cache_nbytes if batch is not None else 0
        if self._weights is None:
            self._weights = weights.size(engine.provider, self._mx.array)
        now = max(self._weights, self._mx.get_active_memory() - cached - running) + (
            self._overhead or 0
        )
        self._fixed = min(self._fixed, now)
        if self._fixed >= hard:
            return  # as exhausted_memory would leave it out: it is below what the model takes
        if self._fixed + cost.bytes_of(tokens) > hard:
            fit = cost.tokens_within(int(hard - self._fixed))
            raise ShimError(
                400, "context_length_exceeded",
                f"the prompt has {tokens} tokens, for which there is not enough memory; accepted: {fit} "
                "(MLX_SHIM_MEMORY_HARD)",
            )  # fmt: skip
        others = [
            entry.length
            for entry in list(engine.entries.values())
            if entry.phase not in (QUEUED, FINISHED) and not entry.stopped
        ]
        # Each sequence of a batch takes as much as the longest.
        together = now + (len(others) + 1) * cost.bytes_of(max([*others, tokens]))
        if others and together > hard:
            raise memory_pressure()
        engine.prompt_cache.trim_to(n_bytes=max(0, hard - together))
