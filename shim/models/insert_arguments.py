"""What is given to the prompt cache becomes its own: the generation loop keeps no hold of it."""

from __future__ import annotations

from typing import Any


def entry_of(args: Any, kwargs: Any) -> Any:
    """The caches, one a layer, in the arguments of `LRUPromptCache.insert_cache`."""
    return args[2] if len(args) > 2 else kwargs.get("prompt_cache")  # noqa: PLR2004


def take_over(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of `insert_cache` with a list of its own, the one that was given emptied.

    Variables of stock's loop have the lists of its last step, for as long as the server is idle or loads a model: what
    is dropped from the prompt cache would be held by them.
    """
    given = entry_of(args, kwargs)
    if type(given) is not list:  # what is more than a list says something to others
        return args, kwargs
    own = [*given]
    given.clear()
    if len(args) > 2:  # noqa: PLR2004
        return (*args[:2], own, *args[3:]), kwargs
    return args, {**kwargs, "prompt_cache": own}
