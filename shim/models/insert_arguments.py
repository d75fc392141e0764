"""The arguments of the prompt cache's insertion, and how the cache alone comes to own its entry."""

from __future__ import annotations

from typing import Any


def entry_of(args: Any, kwargs: Any) -> Any:
    """The caches, one for each layer, in the arguments of `LRUPromptCache.insert_cache`."""
    return args[2] if len(args) > 2 else kwargs.get("prompt_cache")  # noqa: PLR2004


def take_over(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of `insert_cache` with a new list of caches; the given list is emptied.

    Variables of stock's loop hold the lists of its last step while the server is idle or loads a
    model. They would keep an entry alive that the prompt cache has dropped.
    """
    given = entry_of(args, kwargs)
    # A subclass of list has a meaning for another guard.
    if type(given) is not list:
        return args, kwargs
    own = [*given]
    given.clear()
    if len(args) > 2:  # noqa: PLR2004
        return (*args[:2], own, *args[3:]), kwargs
    return args, {**kwargs, "prompt_cache": own}
