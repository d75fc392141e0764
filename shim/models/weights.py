"""The size of the loaded model's weights."""

from __future__ import annotations

from typing import Any


def size(provider: Any, array: type) -> int:
    """The bytes of a ModelProvider's model and draft model, each array once; 0 if none is loaded.

    Nothing is evaluated.
    """
    arrays: dict[int, int] = {}
    for model in (getattr(provider, "model", None), getattr(provider, "draft_model", None)):
        _weigh(model.parameters() if model is not None else None, array, arrays)
    return sum(arrays.values())


def _weigh(tree: Any, array: type, arrays: dict[int, int]) -> None:
    if isinstance(tree, array):
        arrays[id(tree)] = tree.nbytes  # type: ignore[attr-defined]
    elif isinstance(tree, dict):
        _weigh(list(tree.values()), array, arrays)
    elif isinstance(tree, list | tuple):
        for branch in tree:
            _weigh(branch, array, arrays)
