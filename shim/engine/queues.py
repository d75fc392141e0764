"""The queues between HTTP threads and engine: they note what is put, and wake those who wait.

A generator's queue of requests is recognised by its type, and becomes a `RequestQueue` when the
generator is made. Each request on it brings the queue of its response, which becomes a
`ResponseQueue` at that moment. This needs no name of the server, and does not change `queue.Queue`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..core import report
from ..core.errors import ClientGone, ShimError
from . import anatomy, facts
from .entries import DECODE, FINISHED, PREFILL, QUEUED, Entry
from .state import Engine, engine

# Seconds: a waiting thread runs the checks at least this often.
POLL = 1.0

# The handler's thread calls each for the request that it waits for. It returns, or raises the error
# that ends the wait.
checks: list[Callable[[Entry], None]] = []
# The thread that brings a request calls each before the engine gets the request. It returns, or
# raises the error that the client gets.
admissions: list[Callable[[], None]] = []
# Attributes of the objects that the engine delivers for a token.
_TOKEN_ATTRIBUTES = ("token", "text")


class Stopped(Exception):
    """Ends a request that no client waits for: raised in the generation thread, caught by stock."""


def watch(generator: Any, engine: Engine) -> None:
    """Watch the generator's queue of requests, and all deliveries.

    Raises LookupError if the generator holds no such queue.
    """
    requests = anatomy.requests_of(generator)
    if requests is None:
        raise LookupError("the generator holds no queue.Queue of requests")
    engine.requests = requests
    if not isinstance(requests, RequestQueue):
        _become(requests, RequestQueue)
        requests.engine = engine  # type: ignore[attr-defined]


def _become(plain: queue.Queue[Any], shim_class: type) -> None:
    """Turn a queue of the server into one of `shim_class`.

    If the queue is of a subclass of queue.Queue, it keeps the methods of that subclass.
    """
    kind = type(plain)
    if kind is not queue.Queue:
        shim_class = type(shim_class.__name__, (shim_class, kind), {})
    plain.__class__ = shim_class


class RequestQueue(queue.Queue[Any]):
    """The generator's queue of requests: it opens an entry for each request that is put on it."""

    engine: Engine

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._is_request():
            responses = _responses_in(item)
            if responses is not None:
                # A trial has an engine of its own, and no admissions.
                for check in admissions if self.engine is engine else ():
                    check()
                self._open(item, responses)
            elif self.engine is engine:
                facts.lose("deliveries", "a request brings no queue.Queue for its response")
        super().put(item, block, timeout)

    def _is_request(self) -> bool:
        """Whether this `put` brings a request. A program may put other objects here too."""
        local = self.engine.local.__dict__
        return (
            bool(local.get("asking"))
            or local.get("handler") is not None
            or self.engine is not engine
        )

    def _open(self, item: Any, responses: queue.Queue[Any]) -> None:
        try:
            local = self.engine.local.__dict__
            parts = tuple(part for part in item if part is not responses)
            entry = self.engine.open(parts, local.get("handler"))
            ResponseQueue.adopt(responses, entry, self.engine)
            if entry.own is not None:
                entry.own.opened(entry)
            if entry.handler is not None:
                local["opened"] = entry
        except Exception as error:
            # The request goes on without an entry.
            report.once(f"a request cannot be watched: {error!r}")

    def _put(self, item: Any) -> None:
        """Put a request of the shim's own in front of all others. `put` calls it."""
        if self.engine.own is not None and isinstance(self.queue, deque):
            self.queue.appendleft(item)
        else:
            super()._put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not facts.has("turns"):
            self.engine.turn(idle=block and timeout is not None)
        return super().get(block, timeout)


def _responses_in(item: Any) -> queue.Queue[Any] | None:
    """Return the queue that a request brings for its response, or None."""
    if not isinstance(item, (tuple, list)):
        return None
    return next((part for part in item if isinstance(part, queue.Queue)), None)


class ResponseQueue(queue.Queue[Any]):
    """A queue.Queue whose `put` notes the delivery, and whose `get` runs the checks while it waits.

    Noting a delivery takes no lock.
    """

    def __init__(self, entry: Entry, token: type | None = None) -> None:
        super().__init__()
        self._begin(entry, engine, token)

    @classmethod
    def adopt(cls, plain: queue.Queue[Any], entry: Entry, engine: Engine) -> None:
        """Turn a queue of the server that is not in use yet into a ResponseQueue."""
        _become(plain, cls)
        plain._begin(entry, engine)  # type: ignore[attr-defined]

    def _begin(self, entry: Entry, engine: Engine, token: type | None = None) -> None:
        self._engine = engine
        self._entry = entry
        # The class of a delivered token, known after the first one.
        self._token = token
        # When the checks last ran.
        self._looked = 0.0
        # Whether its request has failed; the generation thread may not know that yet.
        self.closed = False
        # The request waits for the engine from now on: its handler may have downloaded a model
        # before.
        entry.last = engine.clock
        entry.queue = self

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self.closed:
            return
        try:
            self._note(item)
        except Stopped:
            raise
        except Exception as error:
            # A mistake of the shim must not end the generation thread.
            self._note_delivery()
            report.once(f"the ledger cannot note a delivery: {error!r}")
        super().put(item, block, timeout)

    def _note(self, item: Any) -> None:
        entry = self._entry
        kind = item.__class__
        # The hot path: this runs for every token.
        if kind is self._token:
            engine = self._engine
            entry.tokens += 1
            entry.phase = DECODE
            entry.last = engine.delivered = engine.clock
            entry.mark = engine.deliveries = engine.deliveries + 1
            entry.step = engine.steps
        elif kind is tuple:
            self._note_progress(*item)
        elif item is None or isinstance(item, BaseException):
            self._note_end(item)
        elif entry.phase == QUEUED:
            self._note_context(item)
        elif any(hasattr(item, name) for name in _TOKEN_ATTRIBUTES):
            self._token = kind
            self._note(item)
        else:
            self._note_delivery()

    def _note_progress(self, processed: int, total: int) -> None:
        """Note progress as a delivery, as long as it advances the request's own prompt.

        Once the prompt is complete, only tokens count.
        """
        entry = self._entry
        # The prefill of a request that is served alone looks at nothing else (mlx-lm 362).
        if entry.stopped and self._engine.serving_alone and not self._engine.distributed:
            raise Stopped
        if processed > entry.processed and entry.phase == PREFILL:
            entry.processed, entry.total, entry.progressed = processed, total, True
            if processed >= total:
                entry.phase = DECODE
            self._note_delivery()

    def _note_context(self, context: Any) -> None:
        entry, engine = self._entry, self._engine
        entry.context = context
        entry.phase = PREFILL
        engine.inserting = entry
        engine.generating = threading.current_thread()
        engine.note_up()
        self._note_delivery()
        # Its handler left after the generation thread had taken it from the queue.
        if entry.stopped:
            engine.stop(entry)

    def _note_end(self, item: Any) -> None:
        entry, engine = self._entry, self._engine
        entry.phase = FINISHED
        if entry.outcome is None and not entry.stopped:
            entry.outcome = "finished" if item is None else "failed"
        # The handler raises this error too; the mark tells it from the handler's own errors.
        if item is not None and not hasattr(item, "_shim_origin"):
            item._shim_origin = "engine"
        self._note_delivery()
        engine.let_go(entry)

    def _note_delivery(self) -> None:
        entry, engine = self._entry, self._engine
        entry.last = engine.delivered = engine.clock
        entry.mark = engine.deliveries = engine.deliveries + 1
        entry.step = engine.steps

    def close(self, error: BaseException) -> None:
        """End the request with `error`, and drop what the generation thread still puts for it.

        Call this in the generation thread.
        """
        self.put(error)
        self.closed = True
        self._engine.stop(self._entry)

    def fail(self, error: ShimError) -> None:
        """Wake the waiting handler with `error`: stock raises an exception that it gets here."""
        self._entry.outcome = self._entry.outcome or "failed"
        super().put(error)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Do as queue.Queue.get, with the caller's timeout, and run the checks while waiting.

        If a check ends the wait, its error is raised.
        """
        if not block or not checks:
            return super().get(block, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if now - self._looked >= POLL:
                self._looked = now
                self._look()
            wait = POLL if deadline is None else min(POLL, deadline - now)
            if wait <= 0:
                raise queue.Empty
            try:
                return super().get(True, wait)
            except queue.Empty:
                continue

    def _look(self) -> None:
        entry = self._entry
        for check in checks:
            try:
                check(entry)
            except (ShimError, ClientGone) as ended:
                entry.outcome = entry.outcome or (
                    "failed" if isinstance(ended, ShimError) else "abandoned"
                )
                self._engine.stop(entry)
                if entry.handler is None:
                    self._engine.close(entry)
                raise
