"""How the shim answers a client: OpenAI's error shape, before the first byte of a body or in the middle of a stream."""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from typing import Any

from . import report
from .errors import ShimError

LINGER = 10.0  # seconds for which an unread body is read and thrown away, at most
_ERROR = 400
_UNAUTHORIZED = 401


class HeldBody:
    """A handler's `wfile` that keeps the headers back until the first byte of the body.

    The stock server sends a stream's 200 as soon as its prompt is tokenized; until there is a body, an error can still
    become the status.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.begun = False  # whether a byte of the body went out
        self._held: bytes | None = None

    def write(self, data: bytes) -> int:
        if not self.begun and self._held is None:
            self._held = bytes(data)  # http.server writes the headers in one piece
            return len(data)
        held, self._held = self._held or b"", None
        self.begun = True
        self.raw.write(
            held + data
        )  # in one piece: should the process end between two, a whole answer would be cut
        return len(data)

    def release(self) -> None:
        """Send what was kept back."""
        if self._held is not None:
            held, self._held = self._held, None
            self.begun = True
            self.raw.write(held)

    def drop(self) -> None:
        """Forget what was kept back: another answer takes its place."""
        self._held = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def answer(handler: Any, error: ShimError, out: Any) -> None:
    """Tell the client: as the status where nothing of a body has gone out, else as an SSE event and no [DONE].

    `out` is a HeldBody, or another wrapper of the handler's wfile that knows whether a body has `begun`.
    """
    body = json.dumps(error.body()).encode()
    handler.close_connection = True
    if out.begun:
        if getattr(handler, "stream", False):
            out.raw.write(b"data: " + body + b"\n\n")
        return  # a cut body says so by its missing bytes
    out.drop()
    handler._headers_buffer = []  # a 200 that stock has queued, and not sent
    send(handler, error.status, body, error.retry_after, out.raw)


def send(
    handler: Any, status: int, body: bytes, retry_after: int | None = None, raw: Any = None
) -> None:
    """A whole JSON answer with the server's own CORS headers."""
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    if retry_after is not None:
        handler.send_header("Retry-After", str(retry_after))
    if status == _UNAUTHORIZED:
        handler.send_header("WWW-Authenticate", "Bearer")  # RFC 9110 wants it
    if status >= _ERROR and handler.close_connection:
        handler.send_header(
            "Connection", "close"
        )  # a proxy that speaks HTTP/1.1 should not ask us again
    _allow_origins(handler)
    lines = getattr(
        handler, "_headers_buffer", []
    )  # there is none for a client that speaks HTTP/0.9
    headers = b"".join(lines) + b"\r\n" if lines else b""
    handler._headers_buffer = []
    (raw or handler.wfile).write(headers + body)


def _allow_origins(handler: Any) -> None:
    """Stock's own headers for other origins, where it has them by the name we know."""
    try:
        handler._set_cors_headers()
    except (AttributeError, TypeError) as error:
        report.once(f"answers of the shim carry no CORS headers: {error}")


def refuse(handler: Any, error: ShimError, linger: float = LINGER) -> None:
    """Answer a request of which nothing has been acted on, its body read or not, and close the connection."""
    logging.getLogger("mlx_lm.server").warning(
        "request answered %d: %s", error.status, report.one_line(error)
    )
    handler.close_connection = True
    handler._headers_buffer = []
    body = b"" if handler.command == "HEAD" else json.dumps(error.body()).encode()
    try:
        send(handler, error.status, body, error.retry_after)
        read_out(handler.connection, linger)
    except OSError as gone:
        report.debug(f"nobody is there to be told: {gone!r}")


def read_out(connection: socket.socket, seconds: float = LINGER) -> None:
    """Let the client send the rest: closing on unread bytes resets the connection, and the answer is lost."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    scratch = bytearray(65536)
    try:
        connection.shutdown(socket.SHUT_WR)
        poll.register(connection, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
            if not connection.recv_into(scratch):
                return
    except OSError as gone:
        report.debug(f"a client has gone: {gone!r}")
