"""Answers the client with OpenAI's error shape: as the status, or in the middle of a stream."""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from typing import Any

from . import report
from .errors import ShimError

# Seconds for which the shim reads and discards an unread body, at most.
LINGER_LIMIT = 10.0
_FIRST_ERROR_STATUS = 400
_UNAUTHORIZED = 401


class HeldBody:
    """A handler's `wfile` that holds the headers back until the first byte of the body.

    Stock sends the 200 of a stream as soon as the prompt is tokenized. As long as there is no
    body, an error can still become the status.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        # Whether a byte of the body has gone out.
        self.begun = False
        self._held: bytes | None = None

    def write(self, data: bytes) -> int:
        if not self.begun and self._held is None:
            # http.server writes the headers in one piece.
            self._held = bytes(data)
            return len(data)
        held, self._held = self._held or b"", None
        self.begun = True
        # In one piece: a process that ends between two writes would cut a whole answer.
        self.raw.write(held + data)
        return len(data)

    def release(self) -> None:
        """Send what was held back."""
        if self._held is not None:
            held, self._held = self._held, None
            self.begun = True
            self.raw.write(held)

    def drop(self) -> None:
        """Forget what was held back: another answer takes its place."""
        self._held = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def answer(handler: Any, error: ShimError, out: Any) -> None:
    """Tell the client about an error.

    Before the first byte of the body the error becomes the status. After it, a stream gets an SSE
    event without [DONE], and any other answer is cut.

    `out` is a HeldBody, or another wrapper of the handler's wfile that knows whether a body has
    `begun`.
    """
    body = json.dumps(error.body()).encode()
    handler.close_connection = True
    if out.begun:
        # The client notices a cut body by its missing bytes.
        if getattr(handler, "stream", False):
            out.raw.write(b"data: " + body + b"\n\n")
        return
    out.drop()
    # Drops a 200 that stock has queued and not sent.
    handler._headers_buffer = []
    send(handler, error.status, body, error.retry_after, out.raw)


def send(
    handler: Any, status: int, body: bytes, retry_after: int | None = None, raw: Any = None
) -> None:
    """Send a whole JSON answer with the server's own CORS headers."""
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    if retry_after is not None:
        handler.send_header("Retry-After", str(retry_after))
    if status == _UNAUTHORIZED:
        # RFC 9110 requires it.
        handler.send_header("WWW-Authenticate", "Bearer")
    if status >= _FIRST_ERROR_STATUS and handler.close_connection:
        # So that a proxy that speaks HTTP/1.1 does not use this connection again.
        handler.send_header("Connection", "close")
    _allow_origins(handler)
    # A client that speaks HTTP/0.9 gets no headers.
    lines = getattr(handler, "_headers_buffer", [])
    headers = b"".join(lines) + b"\r\n" if lines else b""
    handler._headers_buffer = []
    (raw or handler.wfile).write(headers + body)


def _allow_origins(handler: Any) -> None:
    """Add stock's own CORS headers, where stock has them under the name that the shim knows."""
    try:
        handler._set_cors_headers()
    except (AttributeError, TypeError) as error:
        report.once(f"answers of the shim carry no CORS headers: {error}")


def refuse(handler: Any, error: ShimError, linger: float = LINGER_LIMIT) -> None:
    """Answer a request that has had no effect yet, and close the connection.

    The body of the request may be unread.
    """
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
        report.debug(f"the client has gone before it was answered: {gone!r}")


def read_out(connection: socket.socket, seconds: float = LINGER_LIMIT) -> None:
    """Let the client send the rest of its body.

    Closing a socket with unread bytes resets the connection, and the client loses the answer.
    """
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
