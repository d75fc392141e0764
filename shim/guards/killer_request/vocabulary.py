"""How many tokens a loaded model knows, whatever its tokenizer says.

That is the number of rows of its embedding, and of its output head.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

# Names of the two matrices in models of mlx_lm, the usual ones first.
HEADS = ("lm_head", "embed_out", "output", "head")
EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "tok_embeddings",
    "token_embeddings",
    "word_embeddings",
    "embeddings",
    "embedding",
    "embed_in",
    "embed",
)


@dataclass(frozen=True)
class Rows:
    """Rows of the two matrices; None where the model has none of a known name."""

    embedding: int | None
    head: int | None


_last: tuple[Any, Rows] = (None, Rows(None, None))


def of(model: Any) -> Rows:
    """The rows of `model`.

    Those of the last model are remembered: a walk over a large model takes milliseconds.
    """
    global _last
    if _last[0] is None or _last[0]() is not model:
        _last = (weakref.ref(model), _count(model))
    return _last[1]


def _count(model: Any) -> Rows:
    found: dict[str, int] = {}
    # Of modules with the same name, the shallowest belongs to the language model itself.
    for path, module in sorted(model.named_modules(), key=lambda item: item[0].count(".")):
        shape: tuple[int, ...] = getattr(getattr(module, "weight", None), "shape", ())
        if len(shape) == 2:  # noqa: PLR2004 - a matrix
            found.setdefault(path.rsplit(".", 1)[-1], shape[0])
    embedding = next((found[name] for name in EMBEDDINGS if name in found), None)
    return Rows(embedding, next((found[name] for name in HEADS if name in found), embedding))
