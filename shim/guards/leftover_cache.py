"""The prompt cache of a model that went stays in memory beside the one that came.

No request can use it until that model is loaded again; it goes when so many others have been inserted, or the bytes of
a limit. Here it is dropped before the other model is loaded, which then finds the room. A load that fails, or a model
that is loaded again later, finds no cache: prompts are computed anew. Names of one model are no switch (needless_reload).
"""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

from ..core import patch, report
from ..core.verdicts import Incompatible, Retired, require
from ..engine.state import engine
from ..models import insert_arguments, model_names
from ..probing import model_switch

UPSTREAM = "mlx-lm 1757, in a comment"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    """See whether an entry of the first model is there when the second has been loaded."""
    require(
        server, "LRUPromptCache.insert_cache(model, tokens, prompt_cache)", "LRUPromptCache.trim_to",
        "ResponseGenerator._generate", "ModelProvider._load(model_path, adapter_path, draft_model_path)",
    )  # fmt: skip
    entries = server.LRUPromptCache()
    entry = SimpleNamespace(nbytes=1, is_trimmable=lambda: False)
    inspect.unwrap(server.LRUPromptCache.insert_cache)(entries, ("first", None, None), [1], [entry])
    try:
        model_switch.run(server, entries)
    except Exception as error:
        raise Incompatible(
            f"ResponseGenerator._generate switches models otherwise than expected: {error!r}"
        ) from error
    if not len(entries):
        raise Retired("the entries of a model go with it")


def apply(server: Any) -> None:
    patch.wrap(server, "ModelProvider._load", _load)
    patch.wrap(server, "LRUPromptCache.insert_cache", _insert)


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """All entries are of the model that is loaded, since those of others went when it came."""
    key = model_names.key_of(args, kwargs)
    # In another thread, of a program that loads models itself, the generation thread may be at those very entries.
    ours = engine.provider is instance
    ours = ours and threading.current_thread() is engine.generation_thread
    if ours and instance.model_key is not None and instance.model_key != key:
        try:
            engine.prompt_cache.trim_to(n_sequences=0)
        except Exception as error:
            report.line(f"the prompt cache of the former model stays: {error!r}")
    return wrapped(*args, **kwargs)


def _insert(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if instance is engine.prompt_cache:
        args, kwargs = insert_arguments.take_over(args, kwargs)
    return wrapped(*args, **kwargs)
