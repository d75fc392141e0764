"""A prompt that is itself an entry of the prompt cache kills the generation thread.

`fetch_nearest_cache` then leaves no token to compute, and the batch cannot begin: IndexError in mlx-lm 0.31.3, "Sequence
N has an empty prompt" from 0.32. An earlier prompt sent with its completion does it; where caches cannot be trimmed
(hybrid models), so does an earlier prompt less its last token. Here the nearest entry for all but the last token is taken
instead, as stock finds, copies and trims it, and what it lacks is computed.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..core import patch, report
from ..core.verdicts import Incompatible, Retired, require

UPSTREAM = "mlx-lm 1215, 1581, 1887"
MODULE = "mlx_lm.models.cache"

_PROBE = [1, 2, 3]


def probe(cache: Any) -> None:
    """Fetch what was just inserted."""
    require(
        cache,
        "LRUPromptCache.fetch_nearest_cache(model, tokens)",
        "LRUPromptCache.insert_cache",
        "KVCache",
        "mx.zeros",
    )
    layer = cache.KVCache()
    token = cache.mx.zeros((1, 1, len(_PROBE), 1))
    layer.update_and_fetch(token, token)
    entries = cache.LRUPromptCache()
    inspect.unwrap(cache.LRUPromptCache.insert_cache)(
        entries, "model", [*_PROBE], [layer]
    )  # evaluates nothing
    found = entries.fetch_nearest_cache("model", [*_PROBE])
    if not isinstance(found, tuple) or len(found) != 2:  # noqa: PLR2004
        raise Incompatible(
            "LRUPromptCache.fetch_nearest_cache does not return a cache and the rest of the tokens"
        )
    if len(found[1]):
        raise Retired(f"an exact hit leaves {len(found[1])} of {len(_PROBE)} tokens to compute")


def apply(cache: Any) -> None:
    patch.wrap(cache, "LRUPromptCache.fetch_nearest_cache", _fetch)


def _fetch(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    found, rest = wrapped(*args, **kwargs)
    tokens = args[1] if len(args) > 1 else kwargs["tokens"]
    if len(rest) or not len(tokens):
        return found, rest
    try:
        return _nearest_but_one(wrapped, args[0] if args else kwargs["model"], tokens)
    except Exception as error:  # in the generation thread, outside any `try` of stock's
        report.line(f"a prompt that is in the cache is computed anew: {error!r}")
        return None, tokens


def _nearest_but_one(fetch: Any, model: Any, tokens: Any) -> Any:
    found, rest = fetch(model, tokens[:-1])
    cached = len(tokens) - 1 - len(rest)
    # A cache trimmed to nothing is not what a fresh one is. And beside a draft model stock stores caches that are a token
    # short of their keys; where stock answered with an error, a wrong answer would be worse than a slow one.
    if (
        found is None
        or cached == 0
        or any(getattr(layer, "offset", 0) not in (0, cached) for layer in found)
    ):
        return None, tokens
    return found, tokens[cached:]
