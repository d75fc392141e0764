"""Ends the server in order: nothing new is taken in, those in flight may finish, whoever cannot is told.

A thread that exists before it is needed waits to be asked, by a signal or by a guard that wants the process replaced.
The server goes on accepting meanwhile, so that new requests are answered 503, and /health says `draining`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ..core import answers, errors, patch, report, settings
from . import answering, fatal
from .state import engine

POLL = 0.05  # seconds
QUIET = 0.2  # seconds left to a request whose body is still coming in, once nothing is in flight
ECHO = 0.3  # seconds in which a second signal is the first again: from `timeout`, a group, a wrapper that passes it on
AT_ONCE = 0.1  # seconds for clients to be told, after a second signal
JOIN = 2.0  # seconds for the generation thread to leave its loop, and to let go of the model
STOP = ("mlx-lm-shim", "stop")  # what rank 0 shares in the place of a request
SILENCE = 10.0  # seconds without a turn or a step of a generation loop that shares a model: the others have gone


@dataclass(frozen=True)
class Order:
    """Why the process should end, with which status, and what a report says of it. A status of 0: it was asked to."""

    why: str
    status: int = fatal.STOPPED
    facts: dict[str, Any] | None = None
    # Whether it ends a drain that is under way at once. An order that may come again does not.
    hurries: bool = True


on_begin: list[Callable[[], None]] = []  # called when a drain begins, in its thread
_orders: queue.SimpleQueue[Order] = (
    queue.SimpleQueue()
)  # its `put` may be called in a signal's handler, even in itself
_posting: set[int] = set()  # threads in do_POST: reading a body, in flight, or refusing
_last_turn = threading.Event()  # of the generation loops that share a model
_start_once = threading.Lock()
_install_once = threading.Lock()


def install(server: Any) -> None:
    """Have new requests refused while a drain is under way; once, whichever guards need it."""
    if _install_once.acquire(blocking=False):
        for path, wrapper in (
            (f"{answering.name_in(server)}.do_POST", _do_post),
            ("ResponseGenerator.__init__", _starts),
            ("ResponseGenerator._share_request", _share_request),
        ):
            patch.try_wrap(server, path, wrapper)


def start() -> None:
    """Start the thread that waits to be asked, once."""
    if _start_once.acquire(blocking=False):
        threading.Thread(target=_run, name="mlx-shim-drain", daemon=True).start()


def ask(order: Order) -> None:
    """Have the process end. Asked once more to stop, it ends at once, if that order hurries.

    May be called in a signal's handler.
    """
    _orders.put(order)


def _starts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    start()
    return wrapped(*args, **kwargs)


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    me = threading.get_ident()
    _posting.add(me)  # before the question: a drain that begins right after it sees us
    try:
        if engine.draining:
            answers.refuse(instance, errors.draining())
            return None
        return wrapped(*args, **kwargs)
    finally:
        _posting.discard(me)


def _share_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """In the generation loops of several machines: rank 0 has all leave in the same turn, none in the midst of a collective."""
    if not engine.distributed:
        return wrapped(*args, **kwargs)
    if _last_turn.is_set() and not engine.rank:
        args, kwargs = ((None, *STOP),), {}
    shared = wrapped(*args, **kwargs)
    if shared is None or shared[1:] != STOP:
        return shared
    engine.ask_to_stop()
    if engine.rank:
        engine.draining = True
        ask(Order("rank 0 has stopped"))
    return None


def _run() -> NoReturn:
    order = _orders.get()
    try:
        _carry_out(order)
    except Exception as error:  # asked to end, it ends
        fatal.exit_orderly(order.status, f"{order.why}; not in order: {error!r}")


def _carry_out(order: Order) -> NoReturn:
    finished = engine.counters["finished"]
    engine.draining = True
    for note in on_begin:
        try:
            note()
        except Exception as error:
            report.line_nowait(f"{note.__module__} failed: {error!r}")
    if engine.in_flight:
        report.line_nowait(
            f"{order.why}: {engine.in_flight} in flight may finish within {settings.current.drain:g} s, "
            "nothing new is taken in; a second signal ends it at once"
        )
    order, hurried = _wait(order)
    if engine.rank and not hurried and not engine.stopping:
        fatal.exit_orderly(
            fatal.EX_SOFTWARE, f"{order.why}, and rank 0 goes on, or has gone without a word"
        )
    cut = engine.in_flight
    if cut:
        engine.fail_waiting(errors.shutting_down())
        engine.wait_for_handlers(AT_ONCE if hurried else settings.current.exit_grace)
    if not hurried:
        _stop_generation()
    finished = engine.counters["finished"] - finished
    fatal.exit_orderly(
        order.status, f"{order.why}; in flight: {finished} finished, {cut} cut short", order.facts
    )


def _wait(order: Order) -> tuple[Order, bool]:
    """Until nobody needs us. The order then in force, and whether a second signal wants it carried out at once."""
    patience = _Patience()
    echo = time.monotonic() + ECHO
    while patience.lasts():
        try:
            another = _orders.get(timeout=POLL)
        except queue.Empty:
            continue
        if order.status == fatal.STOPPED == another.status:
            if not another.hurries or time.monotonic() < echo:
                continue
            return order, True
        if another.status == fatal.STOPPED:
            order, echo = (
                another,
                time.monotonic() + ECHO,
            )  # it was to be replaced, and now somebody wants it stopped
    return order, False


class _Patience:
    """How long a drain waits: for MLX_SHIM_DRAIN at most, and not for what cannot come."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + settings.current.drain
        if engine.rank:  # rank 0 is given its time in full, to stop us
            self._deadline += settings.current.exit_grace + JOIN
        self._quiet: float | None = None
        self._seen: tuple[int, int] | None = None
        self._moved = 0.0

    def lasts(self) -> bool:
        now = time.monotonic()
        if engine.rank:
            return now < self._deadline and self._moves(
                now
            )  # its part in the work of rank 0 is not seen here
        if engine.in_flight:
            self._quiet = None
            return engine.up and now < self._deadline and self._moves(now)
        if self._quiet is None:
            self._quiet = now + QUIET
        return bool(_posting) and now < self._quiet

    def _moves(self, now: float) -> bool:
        """Whether anything may still be delivered."""
        if engine.generation_is_over or engine.stalled is not None:
            return False
        seen = engine.turns, engine.steps
        if seen != self._seen or not engine.distributed:
            self._seen, self._moved = seen, now
        return now - self._moved < SILENCE


def _stop_generation() -> None:
    """Stock's own end of the generation thread. One that is stuck, or loads a model, goes with the process."""
    for entry in engine.known():
        engine.stop(entry)  # one that is served alone looks at nothing else
    thread = engine.generation_thread
    if thread is not None and engine.up:
        if engine.distributed and not engine.rank:
            _last_turn.set()
        else:
            thread.join(JOIN if engine.ask_to_stop() else 0)
            return
        thread.join(JOIN)
