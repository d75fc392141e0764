"""Where the engine's facts come from: wrappers around the stock server that watch it and change nothing."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from . import fatal, ledger, patch, report, watchdog
from .engine import Entry, engine


def install(server: Any, on_start: Callable[[], None]) -> None:
    """Keep `engine` current, and call `on_start` when a server starts (a mere import of mlx_lm.server is none)."""

    def starts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        _framed(fatal.prepare, on_start, watchdog.start)
        engine.attach(instance)
        engine.ending = None  # a program that stopped one server may start another
        return wrapped(*args, **kwargs)

    def make_queue(*args: Any, **kwargs: Any) -> queue.Queue[Any]:
        """What the server's name `Queue` is now: a response queue where `generate` opens a request, else the stock one."""
        entry = getattr(engine.local, "entry", None)
        if entry is None:
            return queue.Queue(*args, **kwargs)
        engine.local.entry = None
        return ledger.ResponseQueue(entry, server.Response)

    def runs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        _framed(on_start)
        engine.running += 1
        engine.runner, engine.run_error = threading.current_thread(), None
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            engine.run_error = error
            raise
        finally:
            engine.running -= 1

    patch.wrap(server, "run", runs)  # first, and alone in every release: a server of any shape says what it lacks
    patch.wrap(server, "ResponseGenerator.__init__", starts)
    patch.wrap(server, "ResponseGenerator.generate", _generate)
    patch.wrap(server, "ResponseGenerator._serve_single", _serve_single)
    patch.wrap(server, "ResponseGenerator._next_request", _next_request)
    patch.wrap(server, "ResponseGenerator._tokenize", patch.after(_tokenized))
    patch.wrap(server, "ResponseGenerator._tokenize", _tokenize)
    patch.wrap(server, "BatchGenerator.insert_segments", patch.after(_inserted))
    patch.wrap(server, "BatchGenerator.next", patch.after(_stepped))
    patch.wrap(server, "BatchGenerator.remove", patch.after(_removed))
    patch.wrap(server, "BatchGenerator.close", patch.after(_closed))
    patch.wrap(server, "ModelProvider.load_default", _load_default)
    patch.wrap(server, "ModelProvider._load", _load)
    patch.wrap(server, "APIHandler.handle_completion", _handle_completion)
    server.Queue = make_queue


def _framed(*steps: Callable[[], None]) -> None:
    """What goes wrong in a step of ours is said, and the server starts all the same."""
    for step in steps:
        try:
            step()
        except Exception as error:
            report.line(f"{step.__module__}.{step.__name__} failed: {error!r}")


def _load_default(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    engine.booting = True  # left so where it raises: death in a load at boot is told from death in service by this
    result = wrapped(*args, **kwargs)
    engine.booting = False
    return result


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    engine.loading += 1
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.loading -= 1


def _serve_single(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    engine.single = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.single = False
        engine.leaving.clear()  # there is no batch beside it


def _next_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Stock waits for a request, rather than glance at the queue, where it has nothing else to do."""
    if not engine.up:
        engine.up_since = time.monotonic()
        engine.up = True
    engine.turns += 1
    if (args[0] if args else kwargs.get("timeout")) is not None:
        engine.leaving.clear()
    return wrapped(*args, **kwargs)


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    engine.tokenizing = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.tokenizing = False


def _tokenized(generator: Any, args: Any, kwargs: Any, result: Any) -> None:
    entry = engine.entry_of(args[1] if len(args) > 1 else kwargs.get("request"))
    if entry is not None:
        entry.prompt = len(result[0])


def entries_of(batch: Any) -> dict[int, Entry]:
    """The requests in a BatchGenerator, by their uid there."""
    entries: dict[int, Entry] = batch.__dict__.setdefault("_shim_entries", {})
    return entries


def _inserted(batch: Any, args: Any, kwargs: Any, uids: Any) -> None:
    """Remember whose sequence this is: the entry whose context was put on its queue just before."""
    entry, engine.inserting = engine.inserting, None
    if len(uids) != 1:
        return
    if entry is not None:
        entries_of(batch)[uids[0]] = engine.local.inserted = entry
    if entry is not None or engine.rank:  # a rank beside 0 has no entries, and has to count the same batch
        engine.batch = weakref.ref(batch)


def _stepped(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    engine.steps += 1
    for response in responses[1]:
        if response.finish_reason is not None:
            entries_of(batch).pop(response.uid, None)


def _removed(batch: Any, args: Any, kwargs: Any, result: Any) -> None:
    for uid in args[0] if args else kwargs["uids"]:
        entry = entries_of(batch).pop(uid, None)
        if entry is not None:
            engine.let_go(entry)


def _closed(batch: Any, args: Any, kwargs: Any, result: Any) -> None:
    for entry in entries_of(batch).values():
        engine.let_go(entry)


def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Open the entry. It closes with its handler, or, where a program calls `generate` itself, with its last delivery."""
    handler = getattr(engine.local, "handler", None)
    entry = engine.open(args[0] if args else kwargs.get("request"), handler)
    engine.local.entry = entry
    try:
        result = wrapped(*args, **kwargs)
    except BaseException:
        entry.outcome = entry.outcome or "failed"
        engine.close(entry)
        raise
    finally:
        engine.local.entry = None
    if handler is not None:
        engine.local.opened = entry
    return result


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    me = threading.get_ident()
    engine.serving[me] = time.monotonic()
    engine.local.handler, engine.local.opened = instance, None
    try:
        return wrapped(*args, **kwargs)
    finally:
        if engine.local.opened is not None:
            engine.close(engine.local.opened)
        engine.local.handler = engine.local.opened = None
        engine.serving.pop(me, None)
