"""Where the engine's facts come from: wrappers around the stock server that watch it, each fact by itself.

A fact whose names are not there is lost, with the reason; the others are watched all the same (shim/engine/facts.py).
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

SERVED = (
    3  # answers of status 200 after which each fact that belongs to every request has been seen
)

# Called when a server starts, before anything is said; again when another starts in the same process.
before_start: list[Callable[[], None]] = []


def install(server: Any, on_start: Callable[[], None]) -> None:
    """Keep `engine` current, and call `on_start` when a server starts (a mere import of mlx_lm.server is none)."""
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
        "deliveries": trial.deliveries,
        "stop flag": _find_stop_flag,
        "asked to stop": _find_stop,
    }.items():
        facts.watch(name, functools.partial(begin, server))
    answering.watch(server)
    watchdog.add(_look)


def _watch_starts(server: Any, on_start: Callable[[], None]) -> None:
    """A server starts with the first of these that is called; what begins then begins once."""

    def begin() -> None:
        _framed(*before_start, fatal.prepare, on_start, watchdog.start)

    def starts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        begin()
        before = set(threading.enumerate())
        engine.generator = instance
        engine.final_error = None  # a program that stopped one server may start another
        result = wrapped(*args, **kwargs)
        _adopt(instance, before)
        return result

    def runs(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
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

    def serves(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """A program may end this and go on: who called it says nothing about the process."""
        begin()
        return wrapped(*args, **kwargs)

    patch.try_wrap(server, "ResponseGenerator.generate", _generate)
    facts.watch("starts", lambda: patch.wrap(server, "ResponseGenerator.__init__", starts))
    patch.try_wrap(
        server, "_run_http_server", serves if patch.try_wrap(server, "run", runs) else runs
    )


def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """What is put on the queue of requests meanwhile is one."""
    engine.local.asking = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        engine.local.asking = False


def _adopt(generator: Any, before: set[threading.Thread] | None) -> None:
    """Know a generator's parts, and watch what is put on its queues."""
    try:
        engine.attach(generator, before)
        queues.watch(generator, engine)
    except Exception as error:
        facts.lose("deliveries", report.one_line(error))


def _look() -> None:
    """Called by the watchdog: find a generator that was not seen when it was made, and facts that are never seen."""
    if engine.generator is None and (engine.running or not facts.has("starts")):
        generator = anatomy.running_generator()
        if generator is not None:
            _adopt(generator, None)
    if engine.served >= SERVED:
        _lose_unseen()


def _lose_unseen() -> None:
    """A wrapper that is in place, and that no request has passed, is in the wrong place."""
    single = facts.known["single"].seen
    batched = facts.has("steps") and engine.steps > 0
    facts.lose_unseen(
        f"{SERVED} requests were served and none was seen",
        also={
            "deliveries": engine.deliveries == 0,
            "turns": engine.turns == 0 and not engine.rank,
            "steps": engine.steps == 0 and not single,
            "batch": batched and not facts.known["batch"].seen,
        },
    )


def _framed(*steps: Callable[[], None]) -> None:
    """What goes wrong in a step of ours is said, and the server starts all the same."""
    for step in steps:
        try:
            step()
        except Exception as error:
            report.line(f"{step.__module__}.{step.__name__} failed: {error!r}")


def _find_stop_flag(server: Any) -> None:
    """A generator's flag is looked for when it is made; that the class has one is seen in a trial."""
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
    engine.booting = True  # left so where it raises: death in a load at boot is told from death in service by this
    result = wrapped(*args, **kwargs)
    engine.booting = False
    if not facts.has("turns"):
        engine.note_up()
    return result


def _watch_loads(server: Any) -> None:
    """`_load` is called where there is something to load; releases before 0.31.3 have `load` alone."""
    path = (
        "ModelProvider._load"
        if verdicts.has(server, "ModelProvider._load")
        else "ModelProvider.load"
    )
    patch.wrap(server, path, _load)


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
        engine.abandoned.clear()  # there is no batch beside it


def _watch_turns(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._next_request", _next_request)


def _next_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Stock waits for a request, rather than glance at the queue, where it has nothing else to do."""
    engine.turn(idle=patch.given(wrapped, args, kwargs, "timeout", 0) is not None)
    return wrapped(*args, **kwargs)


def _watch_tokenizing(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._tokenize", _tokenize)


def _tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The tokens are the first of several results, or (0.30.7) all there is."""
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
    """The requests in a BatchGenerator, by their uid there."""
    entries: dict[int, Entry] = batch.__dict__.setdefault("_shim_entries", {})
    return entries


def _watch_steps(server: Any) -> None:
    patch.wrap(server, "BatchGenerator.next", patch.after(_stepped))


def _stepped(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    engine.steps += 1


def _watch_batch(server: Any) -> None:
    """Whose sequence a uid is. Releases before 0.31.2 have none of these names, and neither does their batch need it."""
    lost = functools.partial(facts.lose, "batch")
    verdicts.require(
        server, "BatchGenerator.insert_segments", "BatchGenerator.remove(uids)", "BatchGenerator.close",
        "BatchGenerator.next",
    )  # fmt: skip
    patch.wrap(server, "BatchGenerator.insert_segments", patch.after(_inserted, lost))
    patch.wrap(server, "BatchGenerator.next", patch.after(_finished, lost))
    patch.wrap(server, "BatchGenerator.remove", patch.after(_removed, lost))
    patch.wrap(server, "BatchGenerator.close", patch.after(_closed, lost))


def _removed(batch: Any, args: Any, kwargs: Any, result: Any) -> None:
    for uid in args[0] if args else kwargs["uids"]:
        entry = entries_of(batch).pop(uid, None)
        if entry is not None:
            engine.let_go(entry)


def _inserted(batch: Any, args: Any, kwargs: Any, uids: Any) -> None:
    """Remember whose sequence this is: the entry whose context was put on its queue just before."""
    facts.saw("batch")
    entry, engine.inserting = engine.inserting, None
    if len(uids) != 1:
        return
    if entry is not None:
        entries_of(batch)[uids[0]] = engine.local.inserted = entry
    if (
        entry is not None or engine.rank
    ):  # a rank beside 0 has no entries, and has to count the same batch
        engine.batch = weakref.ref(batch)


def _finished(batch: Any, args: Any, kwargs: Any, responses: Any) -> None:
    for response in responses[1]:
        if response.finish_reason is not None:
            entries_of(batch).pop(response.uid, None)


def _closed(batch: Any, args: Any, kwargs: Any, result: Any) -> None:
    for entry in entries_of(batch).values():
        engine.let_go(entry)
