"""The lookup of a prompt in the prompt cache can take longer than computing the prompt.

All requests wait meanwhile. `PromptTrie.search` looks for the shortest entry that continues the
prompt, and at every token of every candidate it copies the path walked so far: with one entry of
120,000 tokens and a prompt that shares four of them, it takes about 15 seconds of the generation
thread. Here one path serves the whole search. It finds the same entries, ties included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..core import patch
from ..core.verdicts import Incompatible, Retired, require

UPSTREAM = "mlx-lm 1607"
MODULE = "mlx_lm.models.cache"

# The key under which a node of stock's trie holds its entry.
VALUE = "__value__"
_RESULT_FIELDS = ("model", "exact", "shorter", "longer", "common_prefix")
# The tokens of the entry with which a search is timed.
_TIMED_TOKENS = 3000
# Stock's time divided by ours: a linear search is below 4, stock's quadratic one is above 20.
_QUADRATIC_RATIO = 8.0
# The entries of small tries, in the order of insertion, and the prompts looked up in each:
# prefixes, ties, forks, misses.
_ENTRIES: tuple[list[int], ...] = (
    [1, 2, 3], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8], [1, 2, 7, 9, 9], [3], [4, 4, 4, 4],
    [4, 4, 5], [4, 4, 6],
)  # fmt: skip
_PROMPTS: tuple[list[int], ...] = (
    [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 7], [1, 2, 9], [3], [3, 3], [4], [4, 4],
    [4, 4, 7], [9],
)  # fmt: skip


def probe(cache: Any) -> None:
    """Time stock's search, and check that ours finds the same as stock's."""
    require(cache, "PromptTrie.add", "PromptTrie.search", "PromptTrieResult")
    search = searching(cache.PromptTrieResult)
    deep = cache.PromptTrie()
    deep.add("model", list(range(_TIMED_TOKENS)), 0)
    stock = _seconds(lambda: deep.search("model", [0, -1]), 2)
    own = _seconds(lambda: search(deep, "model", [0, -1]), 8)
    if stock <= _QUADRATIC_RATIO * own:
        raise Retired(
            f"a search over {_TIMED_TOKENS} tokens takes {stock / own:.1f} times "
            "what a linear one takes"
        )
    trie = cache.PromptTrie()
    for entry in _ENTRIES:
        trie.add("model", entry, entry)
        for model in ("model", "other"):
            for prompt in _PROMPTS:
                theirs, ours = trie.search(model, prompt), search(trie, model, prompt)
                if any(getattr(theirs, name) != getattr(ours, name) for name in _RESULT_FIELDS):
                    raise Incompatible(
                        f"PromptTrie.search finds {theirs} where {ours} was expected"
                    )


def apply(cache: Any) -> None:
    search = searching(cache.PromptTrieResult)

    def instead(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return search(instance, *args, **kwargs)

    patch.wrap(cache, "PromptTrie.search", instead)


def _seconds(run: Callable[[], Any], times: int) -> float:
    """The least processor time of this thread for a run: other work of the machine is left out."""
    least = float("inf")
    for _ in range(times):
        start = time.thread_time()
        run()
        least = min(least, time.thread_time() - start)
    return max(least, 1e-6)


def searching(result: Any) -> Callable[[Any, Any, Any], Any]:
    """The search: a function of a trie, a model and tokens. It returns a `result`."""

    def search(trie: Any, model: Any, tokens: Any) -> Any:
        node = trie._trie.get(model)
        if node is None:
            return result(model, None, None, None, 0)
        if not tokens and VALUE in node:
            return result(model, [], None, None, 0)
        last, index = -1, 0
        while index < len(tokens) and tokens[index] in node:
            node = node[tokens[index]]
            if VALUE in node:
                last = index
            index += 1
        if last == len(tokens) - 1 >= 0:
            return result(model, tokens, None, None, 0)
        # Stock ignores a prefix of one token.
        shorter = tokens[: last + 1] if last > 0 else None
        extra = _shortest(node) if index > 0 else None
        longer = None if extra is None else tokens[:index] + extra
        return result(model, None, shorter, longer, index)

    return search


def _shortest(root: Any) -> list[Any] | None:
    """The path from `root` to the nearest entry; of several such, the first in stock's order."""
    best: list[Any] | None = None
    path: list[Any] = []
    # Each: a node yet to be visited, its depth, and the token that leads to it.
    forks = [(root, 0, None)]
    while forks:
        node, depth, token = forks.pop()
        if depth:
            path[depth - 1 :] = (token,)
        while best is None or len(path) < len(best):
            if VALUE in node:
                best = path[:]
                break
            if len(node) != 1:
                depth = len(path) + 1
                forks.extend((child, depth, token) for token, child in node.items())
                break
            ((token, node),) = node.items()
            path.append(token)
    return best
