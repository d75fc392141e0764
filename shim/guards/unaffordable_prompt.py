"""A prompt that does not fit into memory is started, and ends the server when memory is used up.

Here, where MLX_SHIM_MEMORY_HARD is set, the shim learns the bytes for each token from the caches of
finished requests, for the loaded model. Before the first request has finished it assumes nothing.
Then a prompt whose cache would need more than the limit is refused before it is started: with 400
and the number of tokens that would fit, or with 503 if it would fit without the other requests.
Entries of the prompt cache are dropped to make room for it.
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
        server,
        "mx.get_active_memory",
        "ResponseGenerator._tokenize(tokenizer, request, args)",
        "LRUPromptCache.insert_cache(model, tokens, prompt_cache)",
        "LRUPromptCache.trim_to",
        "ModelProvider._load",
    )


def apply(server: Any) -> None:
    guard = _Guard(server.mx)
    patch.wrap(server, "LRUPromptCache.insert_cache", guard.learn)
    patch.wrap(server, "ModelProvider._load", guard.forget)
    patch.wrap(server, "ResponseGenerator._tokenize", guard.tokenize)


def _may_shrink(caches: Any) -> bool:
    """Whether longer caches take fewer bytes for each token, so that these do not tell the cost.

    With --kv-bits (served alone, from 0.32 on) caches are quantized past --quantized-kv-start.
    """
    bits = getattr(engine.arguments, "kv_bits", None)
    return bits is not None and any(hasattr(cache, "to_quantized") for cache in caches)


class _Guard:
    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._cost: kv_cost.Cost | None = None
        # Bytes: the least in use with this model besides the caches of requests.
        self._fixed = math.inf
        # Bytes of the model. The bytes besides the caches are never fewer, though they may seem so:
        # caches that share arrays are counted twice.
        self._weights: int | None = None
        # Bytes of the process besides MLX's, once it has generated something.
        self._overhead: int | None = None

    def forget(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self._cost, self._fixed, self._weights = None, math.inf, None
        return wrapped(*args, **kwargs)

    def learn(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        with report.contained("the memory that a token takes cannot be learnt"):
            caches = insert_arguments.entry_of(args, kwargs)
            if caches and instance is engine.prompt_cache and not _may_shrink(caches):
                self._cost = kv_cost.learn(caches)
            if self._overhead is None:
                memory.give_back()
                usage = memory.usage(self._mx)
                self._overhead = max(0, usage.footprint - usage.active - usage.pool)
        return wrapped(*args, **kwargs)

    def tokenize(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Refuse the prompt here, where stock gives an exception to this request alone."""
        result = wrapped(*args, **kwargs)
        if self._cost is None or "memory_hard" in engine.ignored_limits:
            return result
        # Other ranks would go on without this one, and another generator may have another model.
        if instance is engine.generator and not engine.distributed:
            try:
                self._admit(self._cost, len(result[0]))
            except ShimError:
                raise
            except Exception as error:
                report.once(f"the memory that a prompt would take is not known: {error!r}")
        return result

    def _admit(self, cost: kv_cost.Cost, tokens: int) -> None:
        hard, cached = settings.current.memory_hard, engine.prompt_cache.nbytes
        batch = engine.batch()
        running = batch.prompt_cache_nbytes if batch is not None else 0
        if self._weights is None:
            self._weights = weights.size(engine.provider, self._mx.array)
        now = max(self._weights, self._mx.get_active_memory() - cached - running)
        now += self._overhead or 0
        self._fixed = min(self._fixed, now)
        if self._fixed >= hard:
            # The limit is below what the model takes; exhausted_memory ignores it then as well.
            return
        if self._fixed + cost.bytes_of(tokens) > hard:
            fit = cost.tokens_within(int(hard - self._fixed))
            raise ShimError(
                400,
                "context_length_exceeded",
                f"the prompt has {tokens} tokens, for which there is not enough memory; "
                f"accepted: {fit} (MLX_SHIM_MEMORY_HARD)",
            )
        others = [
            entry.length
            for entry in list(engine.entries.values())
            if entry.phase not in (QUEUED, FINISHED) and not entry.stopped
        ]
        # Each sequence of a batch takes as much as the longest one.
        together = now + (len(others) + 1) * cost.bytes_of(max([*others, tokens]))
        if others and together > hard:
            raise memory_pressure()
        engine.prompt_cache.trim_to(n_bytes=max(0, hard - together))
