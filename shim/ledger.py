"""The response queue of one request: what is put on it is noted in the ledger; who waits on it can be woken.

It stands in for `queue.Queue` where mlx_lm.server makes the queue of a response. `queue.Queue` itself, and the server's
queue of requests, stay as they are.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from . import report
from .engine import DECODE, FINISHED, PREFILL, QUEUED, Entry, engine
from .errors import ClientGone, ShimError

POLL = 1.0  # seconds: a waiter looks around at least this often

# Asked by the handler's thread about the request it waits for; each raises what ends that wait, or returns.
checks: list[Callable[[Entry], None]] = []


class Stopped(Exception):
    """Raised in the generation thread, where the stock server contains it, to end a request that nobody waits for."""


class ResponseQueue(queue.Queue[Any]):
    """A queue.Queue whose `put` notes the delivery, without a lock of its own, and whose `get` keeps its eyes open."""

    def __init__(self, entry: Entry, token: type) -> None:
        super().__init__()
        self._entry = entry
        self._token = token  # the server's class Response: one token
        self._looked = 0.0
        self.closed = False  # its request has failed, and the generation thread may not know it yet
        entry.last = engine.clock  # from now on it waits for the engine; its handler may have downloaded a model before
        entry.queue = self

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if self.closed:
            return
        try:
            self._note(item)
        except Stopped:
            raise
        except Exception as error:  # the generation thread is no place for a mistake of ours
            report.line(f"the ledger cannot note a delivery: {error!r}")
        queue.Queue.put(self, item, block, timeout)

    def _note(self, item: Any) -> None:
        entry = self._entry
        kind = item.__class__
        if kind is self._token:  # once a token: the hot path
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

    def _note_progress(self, processed: int, total: int) -> None:
        """Progress counts while it advances the request's own prompt; once that is complete, only tokens count."""
        entry = self._entry
        if entry.stopped and engine.single and not engine.distributed:
            raise Stopped  # prefill alone in the loop looks at nothing else (upstream 362)
        if processed > entry.processed and entry.phase == PREFILL:
            entry.processed, entry.total, entry.progressed = processed, total, True
            if processed >= total:
                entry.phase = DECODE
            self._delivered()

    def _note_context(self, context: Any) -> None:
        entry = self._entry
        entry.context = context
        entry.phase = PREFILL
        engine.inserting = entry
        self._delivered()
        if entry.stopped:  # its handler left between the queue and here
            context.stop()

    def _note_end(self, item: Any) -> None:
        entry = self._entry
        entry.phase = FINISHED
        if entry.outcome is None and not entry.stopped:
            entry.outcome = "finished" if item is None else "failed"
        if item is not None and not hasattr(item, "_shim_origin"):
            item._shim_origin = "engine"  # for the handler, which raises it among its own
        self._delivered()
        engine.let_go(entry)
        if entry.handler is None:
            engine.close(entry)  # a program called `generate` itself: no handler will

    def _delivered(self) -> None:
        entry = self._entry
        entry.last = engine.delivered = engine.clock
        entry.mark = engine.deliveries = engine.deliveries + 1
        entry.step = engine.steps

    def close(self, error: BaseException) -> None:
        """In the generation thread: end the request with `error`, and drop what that thread still puts for it."""
        self.put(error)
        self.closed = True
        engine.stop(self._entry)

    def fail(self, error: ShimError) -> None:
        """Wake the waiter with `error`: the stock server raises what it finds on its queue."""
        self._entry.outcome = self._entry.outcome or "failed"
        queue.Queue.put(self, error)

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
        for check in checks:
            try:
                check(self._entry)
            except (ShimError, ClientGone):
                engine.stop(self._entry)
                raise
