"""How many tokens a loaded model knows: rows of its embedding and of its output head, whatever its tokenizer says."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

HEADS = ("lm_head", "embed_out", "output", "head")
EMBEDDINGS = (
    "embed_tokens", "wte", "tok_embeddings", "token_embeddings", "word_embeddings", "embeddings", "embedding",
    "embed_in", "embed",
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows of the two matrices; None where the model has none that is known by its name."""

    embedding: int | None
    head: int | None


_last: tuple[Any, Rows] = (None, Rows(None, None))


def of(model: Any) -> Rows:
    """The rows of `model`. The last model's are remembered: a walk over a large one takes milliseconds."""
    global _last
    if _last[0] is None or _last[0]() is not model:
        _last = (weakref.ref(model), _count(model))
    return _last[1]


def _count(model: Any) -> Rows:
    found: dict[str, int] = {}
    modules = sorted(model.named_modules(), key=lambda item: item[0].count("."))
    for (
        path,
        module,
    ) in modules:  # the shallowest of a name first: that of the language model itself
        shape: tuple[int, ...] = getattr(getattr(module, "weight", None), "shape", ())
        if len(shape) == 2:  # noqa: PLR2004
            found.setdefault(path.rsplit(".", 1)[-1], shape[0])
    embedding = next((found[name] for name in EMBEDDINGS if name in found), None)
    return Rows(embedding, next((found[name] for name in HEADS if name in found), embedding))
