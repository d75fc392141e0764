"""Runs the stock server and writes its memory to stderr, in lines "METER {json}".

at "insert": after an insertion into the prompt cache
at "turn": the generation loop asks for a request, and something has changed since the last time
at "load": right before a model is loaded
at "loaded": right after

entries, counted: entries of the prompt cache, and their bytes by its own count
batch: bytes of the batch, by its own count
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


# Before the server imports the name: any wrapper of that comes on top of this one.
mlx_lm.utils.load = load
from mlx_lm import server  # noqa: E402


def meter(owner, name, note=None, at=None):
    """Call `note` or `say` after each call of a method, including the wrappers that it has now."""
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
    meter(server.LRUPromptCache, "__init__", caches.append)
    meter(server.LRUPromptCache, "insert_cache", at="insert")
    meter(server.BatchGenerator, "__init__", batches.append)
    meter(server.BatchGenerator, "close", batches.remove)
    meter(server.ResponseGenerator, "_next_request", at="turn")
    server.main()
