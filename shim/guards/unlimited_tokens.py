"""A prompt and a completion may have any length, until the machine has no memory left.

That was at 145K tokens on a 48 GB Mac. Here, for each setting that is given: a prompt above
MLX_SHIM_MAX_PROMPT_TOKENS gets 400; MLX_SHIM_MAX_TOKENS caps max_tokens; a completion that reaches
MLX_SHIM_MAX_CONTEXT together with its prompt ends with finish_reason `length`; with
MLX_SHIM_MAX_KV_SIZE stock keeps a rotating cache of so many tokens.
"""

from __future__ import annotations

from typing import Any

from ..core import patch, report, settings
from ..core.errors import ShimError
from ..core.verdicts import require
from ..engine.state import engine

UPSTREAM = "mlx-lm 854, 948, 1480"
MODULE = "mlx_lm.server"
SETTINGS = ("max_prompt_tokens", "max_tokens", "max_context", "max_kv_size")


def probe(server: Any) -> None:
    require(
        server,
        "ResponseGenerator._tokenize(tokenizer, request, args)",
        "BatchGenerator.__init__(model)",
        "make_prompt_cache(model)",
    )


def apply(server: Any) -> None:
    limits = settings.current
    if limits.max_prompt_tokens or limits.max_tokens or limits.max_context:
        patch.wrap(server, "ResponseGenerator._tokenize", _tokenize)
    if limits.max_kv_size:
        patch.wrap(server, "BatchGenerator.__init__", _batch)
        patch.wrap(server, "make_prompt_cache", _prompt_cache)


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Apply the limits where stock gives an exception to this request alone.

    Stock has not read max_tokens yet.
    """
    result = wrapped(*args, **kwargs)
    if not isinstance(result, tuple) or not isinstance(result[0], list):
        report.mark_failed(
            "unlimited_tokens",
            f"_tokenize returns a {type(result).__name__} that does not begin with a list",
        )
        return result
    limits, length = settings.current, len(result[0])
    generation = patch.given(wrapped, args, kwargs, "args", 2)
    if limits.max_prompt_tokens and length > limits.max_prompt_tokens:
        raise _too_long(
            f"{length} tokens; accepted: {limits.max_prompt_tokens} (MLX_SHIM_MAX_PROMPT_TOKENS)"
        )
    if limits.max_context and length >= limits.max_context:
        room = f"{limits.max_context - 1}, one less than MLX_SHIM_MAX_CONTEXT"
        raise _too_long(f"{length} tokens; accepted: {room}")
    for most in (limits.max_tokens, limits.max_context and limits.max_context - length):
        if most:
            generation.max_tokens = min(generation.max_tokens, most)
    return result


def _too_long(what: str) -> ShimError:
    return ShimError(400, "context_length_exceeded", f"the prompt has {what}")


def _batch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # For a model that makes its own caches 0.31 would apply the limit in batches only, and the
    # generation thread would die when these caches meet those of a request served alone.
    if not _makes_its_own(patch.given(wrapped, args, kwargs, "model", 0)):
        kwargs.setdefault("max_kv_size", settings.current.max_kv_size)
    return wrapped(*args, **kwargs)


def _prompt_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The caches of a request served alone; caches that are quantized or trimmed cannot rotate."""
    model = patch.given(wrapped, args, kwargs, "model", 0)
    if len(args) > 1 or "max_kv_size" in kwargs or _makes_its_own(model):
        return wrapped(*args, **kwargs)
    if getattr(engine.arguments, "kv_bits", None) or getattr(engine.provider, "draft_model", None):
        report.once("MLX_SHIM_MAX_KV_SIZE does nothing with --kv-bits or a draft model")
        return wrapped(*args, **kwargs)
    return wrapped(*args, **kwargs, max_kv_size=settings.current.max_kv_size)


def _makes_its_own(model: Any) -> bool:
    if not hasattr(model, "make_cache"):
        return False
    family = type(model).__module__.rsplit(".", 1)[-1]
    report.once(f"MLX_SHIM_MAX_KV_SIZE does nothing for {family}: it makes its own caches")
    return True
