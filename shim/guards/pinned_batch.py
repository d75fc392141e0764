"""An entry of the prompt cache pins the whole batch it came from.

What `extract` gives is lazy, or a view: an entry counted as 12 MiB has held 59. The server's limits on the prompt cache
count bytes that are not the ones held. Here an entry is made to own exactly its bytes before it is inserted, which
costs a copy of them.
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
            # Served alone it was never part of a batch, and large as it is it need not be copied.
            if not (engine.serving_alone and hasattr(layer, "keys")):
                self.own_or_leave(layer)
        return wrapped(*args, **kwargs)

    def own_or_leave(self, layer: Any) -> None:
        """Layer by layer, so that no more than one is there twice. Where there is no room for a copy, it stays as it is."""
        own = getattr(layer, "__dict__", {})  # a layer without one is refused below
        as_it_was = dict(own)
        arrays: list[Any] = []
        try:
            self.own(layer, arrays)
            self.mx.eval(arrays)
        except Exception as error:
            own.update(as_it_was)
            report.line(f"an entry of the prompt cache stays in its batch: {error!r}")

    def own(self, layer: Any, arrays: list[Any]) -> None:
        """Give `layer` arrays of its own, noted in `arrays`; caches within it (a CacheList) likewise.

        By attribute, since what `state` holds differs between releases.
        """

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, self.mx.array) and leaf.ndim:
                # A gather along the first axis copies, bit for bit, whatever the type; a slice or `contiguous` may not.
                arrays.append(self.mx.take(leaf, self.mx.arange(leaf.shape[0]), axis=0))
                return arrays[-1]
            if hasattr(leaf, "nbytes") and hasattr(leaf, "__dict__"):
                self.own(leaf, arrays)
            return leaf

        for name, value in list(vars(layer).items()):
            vars(layer)[name] = self.tree_map(copy, value)
