"""Watches stock by wrappers around its functions, and keeps `engine` current.

Each fact is watched by itself. If a release does not have the names that a fact needs, that fact is
lost, with the reason, and the others are still watched (shim/engine/facts.py).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..core import patch, report, verdicts
from . import anatomy, answering, facts, fatal, queues, trial, watchdog
from .entries import Entry
from .state import engine

# After this many answers of status 200, each fact that every request shows must have been seen.
ANSWERS_BEFORE_LOSS = 3


def install(server: Any, on_start: Callable[[], None]) -> None:
    """Keep `engine` current, and call `on_start` when a server starts.

    The import of mlx_lm.server alone does not start one.
    """
    _watch_starts(server, on_start)
    for name, begin in {
        "stops": _watch_stops,
        "boot": _watch_boot,
        "loads": _watch_loads,
        "turns": _watch_turns,
        "tokenizing": _watch_tokenizing,
        "single": _watch_single,
        "steps": _watch_steps,
        "batch": _watch_batch,
        "deliveries": trial.try_deliveries,
        "stop flag": _find_stop_flag,
        "asked to stop": _find_stop,
    }.items():
        facts.watch(name, functools.partial(begin, server))
    answering.watch(server)
    watchdog.add(_look)


def _watch_starts(server: Any, on_start: Callable[[], None]) -> None:
    """Watch for the start of a server: it starts with the first call of one of these functions."""

    def begin() -> None:
        _attempt(fatal.prepare, on_start, watchdog.start)

    def make_generator(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        begin()
        before = set(threading.enumerate())
        engine.generator = instance
        # A program that has stopped one server may start another.
        engine.final_error = None
        result = wrapped(*args, **kwargs)
        _adopt(instance, before)
        return result

    def run(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        begin()
        engine.running += 1
        engine.runner, engine.run_error = threading.current_thread(), None
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            engine.run_error = error
            raise
        finally:
            engine.running -= 1

    def serve(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Begin, and note no runner: a program may end this call and go on."""
        begin()
        return wrapped(*args, **kwargs)

    patch.try_wrap(server, "ResponseGenerator.generate", _generate)
    facts.watch("starts", lambda: patch.wrap(server, "ResponseGenerator.__init__", make_generator))
    has_run = patch.try_wrap(server, "run", run)
    patch.try_wrap(server, "_run_http_server", serve if has_run else run)


def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Mark the call, so that an object which it puts on the queue counts as a request."""
    engine.local.asking = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.local.asking = False


def _adopt(generator: Any, before: set[threading.Thread] | None) -> None:
    """Find a generator's parts, and watch its queues."""
    try:
        engine.attach(generator, before)
        queues.watch(generator, engine)
    except Exception as error:
        facts.lose("deliveries", report.one_line(error))


def _look() -> None:
    """Find a generator that was not seen when it was made, and lose facts that are never seen.

    The watchdog calls this.
    """
    if engine.generator is None and (engine.running or not facts.has("starts")):
        generator = anatomy.running_generator()
        if generator is not None:
            _adopt(generator, None)
    if engine.served >= ANSWERS_BEFORE_LOSS:
        _lose_unseen()


def _lose_unseen() -> None:
    """Lose each fact whose wrapper no request has called: the wrapper is in the wrong place."""
    single = facts.known["single"].seen
    batched = facts.has("steps") and engine.steps > 0
    facts.lose_unseen(
        f"{ANSWERS_BEFORE_LOSS} requests were served and none was seen",
        also={
            "deliveries": engine.deliveries == 0,
            "turns": engine.turns == 0 and not engine.rank,
            "steps": engine.steps == 0 and not single,
            "batch": batched and not facts.known["batch"].seen,
        },
    )


def _attempt(*steps: Callable[[], None]) -> None:
    """Run steps of the shim. Report an exception in one, so that the server starts in any case."""
    for step in steps:
        try:
            step()
        except Exception as error:
            report.line(f"{step.__module__}.{step.__name__} failed: {error!r}")


def _find_stop_flag(server: Any) -> None:
    """Check on a copied generator that it has a stop flag.

    The flag of the real generator is looked up when that generator is made.
    """
    generator = trial.generator(server)
    if generator is not None and anatomy.stop_flag(generator) is None:
        raise LookupError("the generator holds no flag that says stop")


def _find_stop(server: Any) -> None:
    if not facts.has("stop flag") and not facts.has("stops"):
        raise LookupError("there is neither a flag nor stop_and_join")


def _watch_stops(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator.stop_and_join", _stop_and_join)


def _stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    anatomy.parts_of(instance).asked_to_stop = True
    return wrapped(*args, **kwargs)


def _watch_boot(server: Any) -> None:
    patch.wrap(server, "ModelProvider.load_default", _load_default)


def _load_default(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # If stock raises, this stays True: so a death while the model loads differs from a later one.
    engine.booting = True
    result = wrapped(*args, **kwargs)
    engine.booting = False
    if not facts.has("turns"):
        engine.note_up()
    return result


def _watch_loads(server: Any) -> None:
    """Watch `_load`, which stock calls only if there is something to load.

    Releases before 0.31.3 have only `load`.
    """
    has_load = verdicts.has(server, "ModelProvider._load")
    patch.wrap(server, "ModelProvider._load" if has_load else "ModelProvider.load", _load)


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    engine.loading += 1
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.loading -= 1


def _watch_single(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._serve_single", _serve_single)


def _serve_single(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    facts.saw("single")
    engine.serving_alone = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.serving_alone = False
        # While one request is served alone there is no batch, so nothing else is computed.
        engine.abandoned.clear()


def _watch_turns(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._next_request", _next_request)


def _next_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note a turn. Stock waits for a request, with a timeout, only if it has nothing else to do."""
    engine.turn(idle=patch.given(wrapped, args, kwargs, "timeout", 0) is not None)
    return wrapped(*args, **kwargs)


def _watch_tokenizing(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._tokenize", _tokenize)


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note the length of the prompt. Its tokens are the first of several results.

    In 0.30.7 they are the only result.
    """
    facts.saw("tokenizing")
    engine.tokenizing = True
    try:
        result = wrapped(*args, **kwargs)
    finally:
        engine.tokenizing = False
    entry = engine.entry_of(patch.given(wrapped, args, kwargs, "request", 1))
    prompt = result[0] if isinstance(result, tuple) and result else result
    if entry is not None and hasattr(prompt, "__len__"):
        entry.prompt = len(prompt)
    return result


def entries_of(batch: Any) -> dict[int, Entry]:
    """Return the requests in a BatchGenerator, by their uid there."""
    entries: dict[int, Entry] = batch.__dict__.setdefault("_shim_entries", {})
    return entries


def _watch_steps(server: Any) -> None:
    patch.wrap(server, "BatchGenerator.next", patch.after(_count_step))


def _count_step(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    engine.steps += 1


def _watch_batch(server: Any) -> None:
    """Watch which request each uid of the batch belongs to.

    Releases before 0.31.2 have none of these names, and their batch does not need this.
    """
    lost = functools.partial(facts.lose, "batch")
    verdicts.require(
        server,
        "BatchGenerator.insert_segments",
        "BatchGenerator.remove(uids)",
        "BatchGenerator.close",
        "BatchGenerator.next",
    )
    patch.wrap(server, "BatchGenerator.insert_segments", patch.after(_note_insertion, lost))
    patch.wrap(server, "BatchGenerator.next", patch.after(_note_finished, lost))
    patch.wrap(server, "BatchGenerator.remove", patch.after(_note_removal, lost))
    patch.wrap(server, "BatchGenerator.close", patch.after(_note_closing, lost))


def _note_removal(batch: Any, args: Any, kwargs: Any, result: Any) -> None:
    for uid in args[0] if args else kwargs["uids"]:
        entry = entries_of(batch).pop(uid, None)
        if entry is not None:
            engine.let_go(entry)


def _note_insertion(batch: Any, args: Any, kwargs: Any, uids: Any) -> None:
    """Note whose sequence was inserted.

    It is that of the entry whose context was put on its queue just before.
    """
    facts.saw("batch")
    entry, engine.inserting = engine.inserting, None
    if len(uids) != 1:
        return
    if entry is not None:
        entries_of(batch)[uids[0]] = engine.local.inserted = entry
    # A rank other than 0 has no entries, but has to count the same batch.
    if entry is not None or engine.rank:
        engine.batch = weakref.ref(batch)


def _note_finished(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    for response in responses[1]:
        if response.finish_reason is not None:
            entries_of(batch).pop(response.uid, None)


def _note_closing(batch: Any, args: Any, kwargs: Any, result: Any) -> None:
    for entry in entries_of(batch).values():
        engine.let_go(entry)
