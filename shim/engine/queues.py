"""The queues between the HTTP threads and the engine: what is put on them is noted, and who waits on them can be woken.

A generator's queue of requests is told by its type, and turned into a `RequestQueue` when the generator is made. Each
request that is put on it brings the queue of its response, which becomes a `ResponseQueue` there and then. No name of
the server is needed for this; `queue.Queue` itself stays as it is.
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

POLL = 1.0  # seconds: a waiter looks around at least this often

# Asked by the handler's thread about the request it waits for; each raises what ends that wait, or returns.
checks: list[Callable[[Entry], None]] = []
# Asked by the thread that brings a request, before the engine gets it; each raises what the client is told, or returns.
admissions: list[Callable[[], None]] = []
# Attributes of the objects that the engine delivers for a token.
_TOKEN = ("token", "text")


class Stopped(Exception):
    """Raised in the generation thread, where the stock server contains it, to end a request that nobody waits for."""


def watch(generator: Any, engine: Engine) -> None:
    """See what is put on the generator's queue of requests, and all that is delivered. Raises LookupError."""
    requests = anatomy.requests_of(generator)
    if requests is None:
        raise LookupError("the generator holds no queue.Queue of requests")
    engine.requests = requests
    if not isinstance(requests, RequestQueue):
        _become(requests, RequestQueue)
        requests.engine = engine  # type: ignore[attr-defined]


def _become(plain: queue.Queue[Any], ours: type) -> None:
    """Make a queue that the server has made one of ours; one of a class of its own keeps what that class does."""
    kind = type(plain)
    plain.__class__ = ours if kind is queue.Queue else type(ours.__name__, (ours, kind), {})


class RequestQueue(queue.Queue[Any]):
    """The generator's queue of requests: a request that is put on it gets its entry."""

    engine: Engine

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self._is_asked():
            responses = _responses_in(item)
            if responses is not None:
                for check in (
                    admissions if self.engine is engine else ()
                ):  # a trial has an engine of its own
                    check()
                self._open(item, responses)
            elif self.engine is engine:
                facts.lose("deliveries", "a request brings no queue.Queue for its response")
        super().put(item, block, timeout)

    def _is_asked(self) -> bool:
        """Whether this is a request: what a program puts here beside those is its own affair."""
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
        except Exception as error:  # the request goes on, without an entry
            report.once(f"a request cannot be watched: {error!r}")

    def _put(self, item: Any) -> None:
        """Called by `put`. A request of the shim's own is taken up next."""
        if self.engine.own is not None and isinstance(self.queue, deque):
            self.queue.appendleft(item)
        else:
            super()._put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not facts.has("turns"):
            self.engine.turn(idle=block and timeout is not None)
        return super().get(block, timeout)


def _responses_in(item: Any) -> queue.Queue[Any] | None:
    """The queue of its response, which a request brings."""
    if not isinstance(item, (tuple, list)):
        return None
    return next((part for part in item if isinstance(part, queue.Queue)), None)


class ResponseQueue(queue.Queue[Any]):
    """A queue.Queue whose `put` notes the delivery, without a lock of its own, and whose `get` keeps its eyes open."""

    def __init__(self, entry: Entry, token: type | None = None) -> None:
        super().__init__()
        self._begin(entry, engine, token)

    @classmethod
    def adopt(cls, plain: queue.Queue[Any], entry: Entry, engine: Engine) -> None:
        """Make a queue.Queue that the server has made, and not used yet, one of ours."""
        _become(plain, cls)
        plain._begin(entry, engine)  # type: ignore[attr-defined]

    def _begin(self, entry: Entry, engine: Engine, token: type | None = None) -> None:
        self._engine = engine
        self._entry = entry
        self._token = token  # the class of a delivered token, known by the first
        self._looked = 0.0
        self.closed = False  # its request has failed, and the generation thread may not know it yet
        entry.last = (
            engine.clock
        )  # from now on it waits for the engine; its handler may have downloaded a model before
        entry.queue = self

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self.closed:
            return
        try:
            self._note(item)
        except Stopped:
            raise
        except Exception as error:  # the generation thread is no place for a mistake of ours
            self._delivered()
            report.once(f"the ledger cannot note a delivery: {error!r}")
        super().put(item, block, timeout)

    def _note(self, item: Any) -> None:
        entry = self._entry
        kind = item.__class__
        if kind is self._token:  # once a token: the hot path
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
        elif any(hasattr(item, name) for name in _TOKEN):
            self._token = kind
            self._note(item)
        else:
            self._delivered()

    def _note_progress(self, processed: int, total: int) -> None:
        """Progress counts while it advances the request's own prompt; once that is complete, only tokens count."""
        entry = self._entry
        if entry.stopped and self._engine.serving_alone and not self._engine.distributed:
            raise Stopped  # prefill alone in the loop looks at nothing else (upstream 362)
        if processed > entry.processed and entry.phase == PREFILL:
            entry.processed, entry.total, entry.progressed = processed, total, True
            if processed >= total:
                entry.phase = DECODE
            self._delivered()

    def _note_context(self, context: Any) -> None:
        entry, engine = self._entry, self._engine
        entry.context = context
        entry.phase = PREFILL
        engine.inserting = entry
        engine.generating = threading.current_thread()
        engine.note_up()
        self._delivered()
        if entry.stopped:  # its handler left between the queue and here
            engine.stop(entry)

    def _note_end(self, item: Any) -> None:
        entry, engine = self._entry, self._engine
        entry.phase = FINISHED
        if entry.outcome is None and not entry.stopped:
            entry.outcome = "finished" if item is None else "failed"
        if item is not None and not hasattr(item, "_shim_origin"):
            item._shim_origin = "engine"  # for the handler, which raises it among its own
        self._delivered()
        engine.let_go(entry)

    def _delivered(self) -> None:
        entry, engine = self._entry, self._engine
        entry.last = engine.delivered = engine.clock
        entry.mark = engine.deliveries = engine.deliveries + 1
        entry.step = engine.steps

    def close(self, error: BaseException) -> None:
        """In the generation thread: end the request with `error`, and drop what that thread still puts for it."""
        self.put(error)
        self.closed = True
        self._engine.stop(self._entry)

    def fail(self, error: ShimError) -> None:
        """Wake the waiter with `error`: the stock server raises what it finds on its queue."""
        self._entry.outcome = self._entry.outcome or "failed"
        super().put(error)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As queue.Queue.get, the caller's timeout included; but where a check ends the wait, raise what it raises."""
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
