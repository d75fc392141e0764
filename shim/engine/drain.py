"""Ends the server in order: it refuses new requests and lets those in flight finish.

The clients of requests that cannot finish are told. A thread that exists from the start waits for
an order, which comes from a signal or from a guard that wants the process replaced. Meanwhile the
server still accepts connections: it answers new requests 503, and /health says `draining`.
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

# Seconds between two looks at the requests in flight.
POLL = 0.05
# Seconds for a request whose body still comes in, once nothing is in flight.
BODY_LIMIT = 0.2
# Seconds in which a second signal counts as the first one again: `timeout`, a process group or a
# wrapper may deliver it twice.
ECHO_WINDOW = 0.3
# Seconds for telling the clients after a second signal.
HURRIED_GRACE = 0.1
# Seconds for the generation thread to leave its loop and to release the model.
JOIN_LIMIT = 2.0
# Seconds without a turn or a step of a generation loop that shares a model: then the other machines
# have gone.
SILENCE_LIMIT = 10.0
# Rank 0 shares this instead of a request.
STOP_MESSAGE = ("mlx-lm-shim", "stop")


@dataclass(frozen=True)
class Order:
    """Why the process should end, with which status, and which facts a report gives.

    The status 0 means that the server was asked to stop.
    """

    why: str
    status: int = fatal.STOPPED
    facts: dict[str, Any] | None = None


# Called when a drain begins, in the drain's thread.
on_begin: list[Callable[[], None]] = []
# A signal handler may call its `put`, even while another `put` is under way.
_orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
# The threads in do_POST: they read a body, have a request in flight, or refuse one.
_posting: set[int] = set()
# Set for the last turn of the generation loops that share a model.
_last_turn = threading.Event()
_start_once = threading.Lock()
_install_once = threading.Lock()


def install(server: Any) -> None:
    """Make the server refuse new requests during a drain. Only the first call has an effect."""
    if _install_once.acquire(blocking=False):
        for path, wrapper in (
            (f"{answering.name_in(server)}.do_POST", _do_post),
            ("ResponseGenerator.__init__", _init),
            ("ResponseGenerator._share_request", _share_request),
        ):
            patch.try_wrap(server, path, wrapper)


def start() -> None:
    """Start the thread that waits for an order, once."""
    if _start_once.acquire(blocking=False):
        threading.Thread(target=_run, name="mlx-shim-drain", daemon=True).start()


def ask(order: Order) -> None:
    """Make the process end. A second order to stop makes it end at once.

    A signal handler may call this.
    """
    _orders.put(order)


def _init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    start()
    return wrapped(*args, **kwargs)


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    me = threading.get_ident()
    # Before the look at `draining`: a drain that begins right after it then sees this thread.
    _posting.add(me)
    try:
        if engine.draining:
            answers.refuse(instance, errors.draining())
            return None
        return wrapped(*args, **kwargs)
    finally:
        _posting.discard(me)


def _share_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Make the generation loops of several machines end in the same turn, when rank 0 says so.

    So no machine leaves in the middle of a collective operation.
    """
    if not engine.distributed:
        return wrapped(*args, **kwargs)
    if _last_turn.is_set() and not engine.rank:
        args, kwargs = ((None, *STOP_MESSAGE),), {}
    shared = wrapped(*args, **kwargs)
    if shared is None or shared[1:] != STOP_MESSAGE:
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
    except Exception as error:
        # The process was asked to end, so it ends.
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
            f"{order.why}: {engine.in_flight} in flight may finish within "
            f"{settings.current.drain:g} s, new requests are refused; "
            "a second signal ends it at once"
        )
    order, hurried = _wait(order)
    if engine.rank and not hurried and not engine.stopping:
        fatal.exit_orderly(
            fatal.EX_SOFTWARE, f"{order.why}, and rank 0 goes on, or has ended without a message"
        )
    cut = engine.in_flight
    if cut:
        engine.fail_waiting(errors.shutting_down())
        engine.wait_for_handlers(HURRIED_GRACE if hurried else settings.current.exit_grace)
    if not hurried:
        _stop_generation()
    finished = engine.counters["finished"] - finished
    fatal.exit_orderly(
        order.status, f"{order.why}; in flight: {finished} finished, {cut} cut short", order.facts
    )


def _wait(order: Order) -> tuple[Order, bool]:
    """Wait until no request needs the server any more.

    Returns the order then in force, and whether a second signal wants it carried out at once.
    """
    patience = _Patience()
    echo = time.monotonic() + ECHO_WINDOW
    while patience.lasts():
        try:
            another = _orders.get(timeout=POLL)
        except queue.Empty:
            continue
        if order.status == fatal.STOPPED == another.status:
            if time.monotonic() < echo:
                continue
            return order, True
        if another.status == fatal.STOPPED:
            # The process was to be replaced, and now it is asked to stop.
            order, echo = another, time.monotonic() + ECHO_WINDOW
    return order, False


class _Patience:
    """Decides how long a drain waits: at most MLX_SHIM_DRAIN, and only for what can finish."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + settings.current.drain
        # Rank 0 gets all its time, because it is the one that stops this machine.
        if engine.rank:
            self._deadline += settings.current.exit_grace + JOIN_LIMIT
        # Until when a drain with nothing in flight waits for bodies.
        self._body_deadline: float | None = None
        # The turns and steps of the engine as they last changed, and when that was.
        self._seen: tuple[int, int] | None = None
        self._moved = 0.0

    def lasts(self) -> bool:
        """Whether the drain goes on."""
        now = time.monotonic()
        # This machine's part in the work of rank 0 does not show in `in_flight`.
        if engine.rank:
            return now < self._deadline and self._moves(now)
        if engine.in_flight:
            self._body_deadline = None
            return engine.up and now < self._deadline and self._moves(now)
        if self._body_deadline is None:
            self._body_deadline = now + BODY_LIMIT
        return bool(_posting) and now < self._body_deadline

    def _moves(self, now: float) -> bool:
        """Whether the engine may still deliver something."""
        if engine.generation_is_over or engine.stalled is not None:
            return False
        seen = engine.turns, engine.steps
        if seen != self._seen or not engine.distributed:
            self._seen, self._moved = seen, now
        return now - self._moved < SILENCE_LIMIT


def _stop_generation() -> None:
    """End the generation thread as stock does.

    A thread that is stuck or loads a model ends only with the process.
    """
    # A request that is served alone looks at nothing else.
    for entry in engine.known():
        engine.stop(entry)
    thread = engine.generation_thread
    if thread is not None and engine.up:
        if engine.distributed and not engine.rank:
            _last_turn.set()
        else:
            thread.join(JOIN_LIMIT if engine.ask_to_stop() else 0)
            return
        thread.join(JOIN_LIMIT)
