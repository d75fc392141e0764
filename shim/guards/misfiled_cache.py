"""With a draft model a prompt cache entry lacks the last token of its key: later answers are wrong.

Stock files the caches under the whole prompt and completion, but they hold at least one token
less. Stock then trims them by the length of the key, they no longer match the text, and the model
gives another answer than it should. Here the key is cut to the tokens that the caches hold. (The
draft model's own caches may lag further behind: that costs guesses, not tokens.)
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import require

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2"
MODULE = "mlx_lm.models.cache"


def probe(cache: Any) -> None:
    """Look at the names only: without a draft model the defect cannot be tried.

    In a release that has cured it, no key is longer than its caches, and the guard changes nothing.
    """
    require(cache, "LRUPromptCache.insert_cache(model, tokens, prompt_cache)")


def apply(cache: Any) -> None:
    patch.wrap(cache, "LRUPromptCache.insert_cache", _insert)


def _insert(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if len(args) >= 3:  # noqa: PLR2004
        model, tokens, caches, *more = args
        return wrapped(model, tokens[: _held(caches, len(tokens))], caches, *more, **kwargs)
    return wrapped(*args, **kwargs)


def _held(caches: Any, length: int) -> int:
    """The tokens in the longest cache, the model's own; `length` if no cache counts its tokens."""
    offsets = [layer.offset for layer in caches if type(getattr(layer, "offset", None)) is int]
    return min(length, max(offsets, default=0) or length)
