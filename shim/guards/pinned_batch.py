"""An entry of the prompt cache keeps the memory of the whole batch it came from.

`extract` returns lazy arrays, or views: an entry counted as 12 MiB has held 59. The server's limits
on the prompt cache thus count other bytes than those in use. Here an entry gets arrays of its own
before it is inserted, which costs one copy of its bytes.
"""

from __future__ import annotations

from typing import Any

from ..core import patch, report
from ..core.verdicts import require
from ..engine.state import engine
from ..models import insert_arguments

UPSTREAM = "mlx-lm 1701, 1807, 1390"
MODULE = "mlx_lm.models.cache"


def probe(cache: Any) -> None:
    require(
        cache, "LRUPromptCache.insert_cache(model, tokens, prompt_cache)", "mx.take", "tree_map"
    )


def apply(cache: Any) -> None:
    patch.wrap(cache, "LRUPromptCache.insert_cache", _Owning(cache))


class _Owning:
    def __init__(self, cache: Any) -> None:
        self.mx = cache.mx
        self.tree_map = cache.tree_map

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        entry = insert_arguments.entry_of(args, kwargs)
        for layer in entry or []:
            # The cache of a request served alone was never part of a batch and needs no copy.
            if not (engine.serving_alone and hasattr(layer, "keys")):
                self.own_or_leave(layer)
        return wrapped(*args, **kwargs)

    def own_or_leave(self, layer: Any) -> None:
        """Copy one layer, or leave it as it is if there is no room for the copy.

        Layer by layer, so that no more than one exists twice.
        """
        # For a layer without a __dict__, `own` below raises.
        own = getattr(layer, "__dict__", {})
        as_it_was = dict(own)
        arrays: list[Any] = []
        try:
            self.own(layer, arrays)
            self.mx.eval(arrays)
        except Exception as error:
            own.update(as_it_was)
            report.line(f"an entry of the prompt cache stays in its batch: {error!r}")

    def own(self, layer: Any, arrays: list[Any]) -> None:
        """Give `layer` arrays of its own, noted in `arrays`, and so the caches in it (a CacheList).

        It goes by the attributes, since the contents of `state` differ between releases.
        """

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, self.mx.array) and leaf.ndim:
                # A gather along the first axis copies every type bit for bit; a slice or
                # `contiguous` may not copy.
                arrays.append(self.mx.take(leaf, self.mx.arange(leaf.shape[0]), axis=0))
                return arrays[-1]
            if hasattr(leaf, "nbytes") and hasattr(leaf, "__dict__"):
                self.own(leaf, arrays)
            return leaf

        for name, value in list(vars(layer).items()):
            vars(layer)[name] = self.tree_map(copy, value)
