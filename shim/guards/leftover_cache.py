"""After a switch of models the prompt cache of the former model stays in memory.

No request can use it until the former model is loaded again. Stock drops it only when enough
other entries were inserted, or by a limit in bytes. Here it is dropped before the other model is
loaded, which then finds the room. After a load that fails, or when a former model is loaded
again, prompts are computed again. Two names of the same model are not a switch (needless_reload).
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
    """See whether an entry of the first model is left when the second has been loaded."""
    require(
        server,
        "LRUPromptCache.insert_cache(model, tokens, prompt_cache)",
        "LRUPromptCache.trim_to",
        "ResponseGenerator._generate",
        "ModelProvider._load(model_path, adapter_path, draft_model_path)",
    )
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
    """Drop all entries: they all belong to the loaded model, as each load dropped those before."""
    key = model_names.key_of(args, kwargs)
    # A program may load models in a thread of its own while the generation thread uses the entries.
    ours = engine.provider is instance
    ours = ours and threading.current_thread() is engine.generation_thread
    if ours and instance.model_key is not None and instance.model_key != key:
        with report.contained("the prompt cache of the former model stays", tell=report.line):
            engine.prompt_cache.trim_to(n_sequences=0)
    return wrapped(*args, **kwargs)


def _insert(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if instance is engine.prompt_cache:
        args, kwargs = insert_arguments.take_over(args, kwargs)
    return wrapped(*args, **kwargs)
