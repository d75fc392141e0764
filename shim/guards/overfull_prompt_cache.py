"""The prompt cache grows past `--prompt-cache-bytes`.

Stock checks that limit only when a request joins a batch. Requests served alone (`seed`, a draft
model, a model that cannot be batched) fill the cache up to its number of entries, whatever their
size. So do the requests of a batch as they finish, until the next request arrives. And the cache
does not shrink while the batch grows. Here the limit holds at every insertion, and while a batch
grows at every turn of the loop (half a second, or a step that takes longer). The bytes of the batch
itself count, as they do in stock. An entry that does not fit is not kept, and the others stay.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from ..core import patch, report
from ..core.verdicts import Incompatible, Retired, require
from ..engine.state import engine
from ..models import insert_arguments
from ..probing import dry_run
from ..probing.dry_run import Anything

UPSTREAM = "mlx-lm 1118, 1392, 1390"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    """Insert an entry into the cache that stock's `run` makes for a limit of one byte."""
    require(
        server,
        "run",
        "LRUPromptCache.insert_cache(model, tokens, prompt_cache)",
        "LRUPromptCache.trim_to",
        "ResponseGenerator._next_request",
        "BatchGenerator.prompt_cache_nbytes",
    )
    made: list[Any] = []
    line = SimpleNamespace(prompt_cache_size=10, prompt_cache_bytes=1)

    def generator(*args: Any, **named: Any) -> Anything:
        made.extend(
            thing for thing in (*args, *named.values()) if isinstance(thing, server.LRUPromptCache)
        )
        return Anything()

    start = dry_run.of(
        server.run, ResponseGenerator=generator, _run_http_server=Anything(), mx=Anything()
    )
    start("127.0.0.1", 0, SimpleNamespace(cli_args=line))
    if not made:
        raise Incompatible("run gives its ResponseGenerator no LRUPromptCache")
    entry = SimpleNamespace(nbytes=2, is_trimmable=lambda: False)
    inspect.unwrap(server.LRUPromptCache.insert_cache)(made[0], "model", [1], [entry])
    if made[0].nbytes <= line.prompt_cache_bytes:
        raise Retired("the prompt cache holds --prompt-cache-bytes by itself")


def apply(server: Any) -> None:
    patch.wrap(server, "LRUPromptCache.insert_cache", _insert)
    patch.wrap(server, "ResponseGenerator._next_request", _next_request)


def _insert(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    room = _room() if instance is engine.prompt_cache else None
    if room is None:
        return wrapped(*args, **kwargs)
    args, kwargs = insert_arguments.take_over(args, kwargs)
    # An entry that does not fit would push out all others before it is itself removed.
    result = None
    if _fits(insert_arguments.entry_of(args, kwargs), room):
        result = wrapped(*args, **kwargs)
    _trim(instance, room)
    return result


def _next_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Once a turn of the loop."""
    room = _room() if instance is engine.generator else None
    if room is not None:
        _trim(engine.prompt_cache, room)
    return wrapped(*args, **kwargs)


def _room() -> int | None:
    """The bytes that the prompt cache may hold besides the batch, as stock counts; None: no limit.

    In a pipeline each machine has other layers and so counts other bytes, but all must keep the
    same entries. There the limit is left to stock.
    """
    try:
        provider = engine.provider
        limit: int | None = engine.arguments.prompt_cache_bytes
        if limit is None or provider.pipeline_group is not None:
            return None
        batch = None if engine.serving_alone else engine.batch()
        return max(0, limit - (0 if batch is None else batch.prompt_cache_nbytes))
    except Exception as error:
        # In the generation thread, outside any `try` of stock. Once a step, so no context manager.
        report.once(f"the bytes of the batch cannot be counted: {error!r}")
        return None


def _fits(entry: Any, room: int) -> bool:
    try:
        size = sum(layer.nbytes for layer in entry)
    except Exception as error:
        # Stock, or another guard, then does with it what it does.
        report.debug(f"an entry of the prompt cache cannot be counted: {error!r}")
        return True
    if size > engine.arguments.prompt_cache_bytes:
        report.once(
            "the cache of a request is larger than --prompt-cache-bytes: no such cache is kept"
        )
    return bool(size <= room)


def _trim(entries: Any, room: int) -> None:
    if entries.nbytes > room:
        with report.contained("the prompt cache cannot be trimmed"):
            entries.trim_to(n_bytes=room)
