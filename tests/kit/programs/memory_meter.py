"""Runs the stock server and says on stderr, in lines "METER {json}", what memory it holds at what moment.

at "insert": after an insertion into the prompt cache
at "turn": where the generation loop asks for a request, unless nothing has changed since the last time
at "load": right before a model is loaded
at "loaded": right after

entries, counted: of the prompt cache, and their bytes as it counts them; batch: the bytes of the batch, as it does
memory, pool: MLX's active memory and its pool of buffers, in bytes
"""

import json
import sys

import mlx.core as mx
import mlx_lm.utils

caches = []
batches = []
last = []


def say(at):
    cache = caches[-1] if caches else ()
    counted = cache.nbytes if caches else 0
    batch = batches[-1].prompt_cache_nbytes if batches else 0
    figures = {"entries": len(cache), "counted": counted, "batch": batch}
    figures |= {"memory": mx.get_active_memory(), "pool": mx.get_cache_memory()}
    if at == "turn" and last == [at, figures]:
        return
    last[:] = at, figures
    sys.stderr.write(f"METER {json.dumps({'at': at, **figures})}\n")


def load(*args, stock=mlx_lm.utils.load, **kwargs):
    say("load")
    loaded = stock(*args, **kwargs)
    say("loaded")
    return loaded


mlx_lm.utils.load = load  # beneath whatever wraps the server's own name for it
from mlx_lm import server  # noqa: E402


def metered(owner, name, note=None, at=None):
    """What wraps it already is measured with it."""
    stock = getattr(owner, name)

    def call(self, *args, **kwargs):
        result = stock(self, *args, **kwargs)
        if note is not None:
            note(self)
        if at is not None:
            say(at)
        return result

    setattr(owner, name, call)


if __name__ == "__main__":
    metered(server.LRUPromptCache, "__init__", caches.append)
    metered(server.LRUPromptCache, "insert_cache", at="insert")
    metered(server.BatchGenerator, "__init__", batches.append)
    metered(server.BatchGenerator, "close", batches.remove)
    metered(server.ResponseGenerator, "_next_request", at="turn")
    server.main()
