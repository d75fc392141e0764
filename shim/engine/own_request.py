"""A request that the shim makes itself: through stock's handler and the whole engine.

It uses a pair of sockets instead of the network, so every part of the server sees a request like
any other. It counts as none: it is not in flight, in no counter, and under no limit of requests.
The engine takes it up before the requests that wait in the queue, and does not keep its caches.
`engine.own` is the own request that the current thread answers.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import patch, report
from ..core.errors import ShimError
from . import anatomy, answering
from .entries import FINISHED, Entry
from .state import engine

# http.server logs this where it logs the address of a client.
CLIENT = ("mlx-lm-shim", 0)
# Seconds to read an answer that the handler has already written.
READ_LIMIT = 5.0

_installed: list[bool] = []
# The own request whose caches the engine may still hand to the prompt cache.
_unfiled: list[OwnRequest] = []


class Answer(NamedTuple):
    """The answer that a client would have got: its status, 0 for none, and the error in it."""

    status: int
    code: str = ""
    message: str = ""


class Unmade(Exception):
    """The request could not be made, which says nothing about the server."""


class OwnRequest:
    """One short request. The generation thread calls `on_caches` with its caches, if it has any."""

    def __init__(
        self,
        path: str,
        body: dict[str, Any],
        tokens: int,
        on_caches: Callable[[Any], None] | None = None,
    ) -> None:
        self.entry: Entry | None = None
        # Set once the request is in the engine's queue, or was refused before that.
        self.asked = threading.Event()
        # Set once the engine has handed its caches to the prompt cache.
        self.filed = threading.Event()
        self._path = path
        self._body = body
        self._tokens = tokens
        self._on_caches = on_caches

    def answer(self, server: Any) -> Answer:
        """Have stock's handler answer it in this thread. Raises Unmade."""
        _unfiled[:] = [self]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            raised = None
            ours.sendall(self._raw())
            ours.shutdown(socket.SHUT_WR)
            engine.local.own = self
            try:
                getattr(server, answering.name_in(server))(engine.generator, theirs, CLIENT, None)
            except Exception as error:
                raised = error
            finally:
                engine.local.own = None
                self.asked.set()
            theirs.close()
            ours.settimeout(READ_LIMIT)
            return _told(raised) if raised is not None else _read(ours)

    def _raw(self) -> bytes:
        body = json.dumps(self._body).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def opened(self, entry: Entry) -> None:
        """Note its entry before it is queued, and lower the default of --max-tokens tokens."""
        self.entry = entry
        for part in entry.parts:
            if isinstance(getattr(part, "max_tokens", None), int):
                part.max_tokens = min(part.max_tokens, self._tokens)
        self.asked.set()

    def end(self, error: ShimError) -> None:
        """Stop it in the engine, and have the handler that waits for it answer with `error`."""
        entry = self.entry
        if entry is not None and entry.queue is not None:
            engine.stop(entry)
            entry.queue.fail(error)

    def is_of(self, tokens: Any) -> bool:
        """Whether a cache for these tokens is of this request, or of a part of its prompt."""
        prompt = getattr(getattr(self.entry, "context", None), "prompt", None)
        if not prompt or not tokens:
            return False
        if len(tokens) < len(prompt) and self.entry.phase == FINISHED:  # type: ignore[union-attr]
            return False
        common = min(len(prompt), len(tokens))
        return list(prompt[:common]) == list(tokens[:common])

    def file(self, tokens: Any, caches: Any) -> None:
        """Take its caches, in place of the prompt cache, and hand them to `on_caches`."""
        if len(tokens) >= len(self.entry.context.prompt):  # type: ignore[union-attr]
            _unfiled[:] = []
            if self._on_caches is not None:
                self._on_caches(caches)
            self.filed.set()


def _told(raised: Exception) -> Answer:
    """Return the answer for an error in the handler: status 0 if stock raised it, else Unmade."""
    trace = raised.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not anatomy.is_of_mlx_lm(trace.tb_frame.f_code.co_filename):
        raise Unmade(repr(raised)) from raised
    return Answer(0, "no_answer", report.one_line(raised))


def _read(ours: socket.socket) -> Answer:
    try:
        answer = http.client.HTTPResponse(ours)
        answer.begin()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, "no_answer", f"the connection was closed without an answer ({error!r})")
    try:
        told = json.loads(text).get("error", "")
    except (ValueError, AttributeError):
        told = text
    if isinstance(told, dict):
        return Answer(answer.status, str(told.get("code", "")), str(told.get("message", "")))
    return Answer(answer.status, "", report.one_line(told))


def install(server: Any) -> bool:
    """Keep the caches of own requests out of the prompt cache. Returns whether that works.

    The guards that make own requests call it; it wraps once.
    """
    if not _installed:
        _installed.append(patch.try_wrap(server, "LRUPromptCache.insert_cache", _insert))
    return _installed[0]


def _insert(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Runs in the generation thread, where stock catches no errors: it must not raise."""
    if _unfiled:
        with report.contained("the caches of the shim's own request cannot be told"):
            own = _unfiled[0]
            tokens = patch.given(wrapped, args, kwargs, "tokens", 1)
            if own.is_of(tokens):
                own.file(tokens, patch.given(wrapped, args, kwargs, "prompt_cache", 2))
                return None
    return wrapped(*args, **kwargs)
