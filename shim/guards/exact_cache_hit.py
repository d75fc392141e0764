"""A prompt that is itself an entry of the prompt cache kills the generation thread.

`fetch_nearest_cache` then leaves no token to compute, and the batch cannot begin: mlx-lm 0.31.3
raises IndexError, 0.32 "Sequence N has an empty prompt". A client causes it by sending an earlier
prompt together with its completion. Where caches cannot be trimmed (hybrid models), an earlier
prompt without its last token causes it too.

Here the guard fetches the nearest entry for all tokens but the last, as stock finds, copies and
trims it. The server computes the tokens that the entry lacks.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..core import patch, report
from ..core.verdicts import Incompatible, Retired, require

UPSTREAM = "mlx-lm 1215, 1581, 1887"
MODULE = "mlx_lm.models.cache"

# Tokens of the prompt that the probe inserts.
_PROBE = [1, 2, 3]


def probe(cache: Any) -> None:
    """Insert a prompt, and fetch the same prompt."""
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
    # Stock's own function, without the wrappers of other guards. It evaluates nothing.
    insert = inspect.unwrap(cache.LRUPromptCache.insert_cache)
    insert(entries, "model", [*_PROBE], [layer])
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
    tokens = patch.given(wrapped, args, kwargs, "tokens", 1)
    if len(rest) or not len(tokens):
        return found, rest
    # In the generation thread, where stock catches nothing.
    with report.contained("a prompt that is in the cache is computed again", tell=report.line):
        return _nearest_but_one(wrapped, patch.given(wrapped, args, kwargs, "model", 0), tokens)
    return None, tokens


def _nearest_but_one(fetch: Any, model: Any, tokens: Any) -> Any:
    found, rest = fetch(model, tokens[:-1])
    cached = len(tokens) - 1 - len(rest)
    # A cache that is trimmed to nothing differs from a fresh one.
    if found is None or cached == 0:
        return None, tokens
    # With a draft model stock stores caches that are a token shorter than their keys. Stock fails
    # there; a slow answer is better than a wrong one.
    if any(getattr(layer, "offset", 0) not in (0, cached) for layer in found):
        return None, tokens
    return found, tokens[cached:]
