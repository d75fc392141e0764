"""Watches the HTTP threads: who answers a request, with which status, and when bytes go out."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from ..core import answers, patch, report
from ..core.errors import ShimError
from . import anatomy, facts
from .state import engine


def watch(server: Any) -> None:
    """Watch the facts `handlers` and `answers`."""
    path = f"{name_in(server)}.handle_completion"
    facts.watch("handlers", lambda: patch.wrap(server, path, _handle_completion))
    facts.watch("answers", lambda: _watch_answers(server))


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    facts.saw("handlers")
    return _answering(wrapped, instance, args, kwargs)


def _answering(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    me = threading.get_ident()
    if engine.own is None:
        engine.serving[me] = time.monotonic()
    engine.local.handler, engine.local.opened = instance, None
    try:
        return wrapped(*args, **kwargs)
    finally:
        if engine.local.opened is not None:
            engine.close(engine.local.opened)
        engine.local.handler = engine.local.opened = None
        engine.serving.pop(me, None)


def _watch_answers(server: Any) -> None:
    """Wrap methods of the server's request handler whose names http.server prescribes."""
    name = name_in(server)
    patch.wrap(server, f"{name}.do_POST", _do_post)
    patch.wrap(server, f"{name}.send_response", patch.after(_note_status))


def name_in(server: Any) -> str:
    """Return the name of the server's request handler: APIHandler, else another such class."""
    own: list[str] = [name for name, value in vars(server).items() if _is_handler(value)]
    if "APIHandler" in own or not own:
        return "APIHandler"
    return own[0]


def _is_handler(value: Any) -> bool:
    """Whether this is a class of mlx_lm that handles HTTP requests."""
    if not (inspect.isclass(value) and issubclass(value, BaseHTTPRequestHandler)):
        return False
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return anatomy.is_of_mlx_lm(file or "")


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    facts.saw("answers")
    me = threading.get_ident()
    engine.local.status = None
    stock = instance.wfile
    answer = engine.answers[me] = _Answer(stock) if _is_needed() else None
    if answer is not None:
        instance.wfile = answer
    try:
        if facts.has("handlers"):
            return wrapped(*args, **kwargs)
        return _answering(wrapped, instance, args, kwargs)
    except ShimError as error:
        # The error that woke a waiting handler, where wrong_status is not there to answer it.
        if answer is None:
            raise
        _tell(instance, error, answer)
        return None
    finally:
        instance.wfile = stock
        engine.answers.pop(me, None)
        if engine.local.status == 200 and engine.own is None:  # noqa: PLR2004
            engine.served += 1


def _is_needed() -> bool:
    """Whether the shim has to watch the bytes of an answer.

    It has to while deliveries cannot be seen, or have not been seen yet, and where wrong_status is
    not active.
    """
    state = report.states.get("wrong_status")
    return (
        not facts.has("deliveries")
        or not engine.deliveries
        or state is None
        or state.kind != "active"
    )


def _tell(handler: Any, error: ShimError, answer: _Answer) -> None:
    try:
        answers.answer(handler, error, answer)
    except OSError as gone:
        report.debug(f"the client has gone before it was answered: {gone!r}")


def _note_status(handler: Any, args: Any, kwargs: Any, result: Any) -> None:
    engine.local.status = args[0] if args else kwargs.get("code")


class _Answer:
    """A handler's `wfile` that notes whether bytes were written to it, and when."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        # Whether a byte was written.
        self.begun = False
        # The engine's clock when the answer was begun, or the last write was over.
        self.silent_since = engine.clock
        # Whether a write is under way: a client that does not read is not the engine's fault.
        self.writing = False

    def write(self, data: bytes) -> Any:
        self.begun = self.writing = True
        try:
            return self.raw.write(data)
        finally:
            self.writing = False
            self.silent_since = engine.clock

    def drop(self) -> None:
        """Do nothing: this class holds nothing back."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)
