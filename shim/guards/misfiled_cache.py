"""Beside a draft model an entry of the prompt cache lacks the last token that its key names: later answers are wrong.

Stock files the caches under prompt and completion, while they hold a token or more less; what is trimmed by the length of
the key is then out of step with the text, and a model says something else than it would. Here the key is cut to what
the caches hold. (The draft model's own may lag further: that costs guesses, not tokens.)
"""

from __future__ import annotations

from typing import Any

from ..core import patch
from ..core.verdicts import require

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2"
MODULE = "mlx_lm.models.cache"


def probe(cache: Any) -> None:
    """Without a draft model nothing can be tried; where the defect is cured, no key is longer than its caches."""
    require(cache, "LRUPromptCache.insert_cache(model, tokens, prompt_cache)")


def apply(cache: Any) -> None:
    patch.wrap(cache, "LRUPromptCache.insert_cache", _insert)


def _insert(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if len(args) >= 3:  # noqa: PLR2004
        model, tokens, caches, *more = args
        return wrapped(model, tokens[: _held(caches, len(tokens))], caches, *more, **kwargs)
    return wrapped(*args, **kwargs)


def _held(caches: Any, length: int) -> int:
    """Tokens in the longest of the caches, which is the model's own; `length` where none counts its tokens."""
    offsets = [layer.offset for layer in caches if type(getattr(layer, "offset", None)) is int]
    return min(length, max(offsets, default=0) or length)
