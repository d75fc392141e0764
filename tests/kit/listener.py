"""Listens on loopback, counts connections, and answers what a test wants, even invalid HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading


def whole(body: bytes, *more: str, status: str = "200 OK", kind: str = "image/png") -> bytes:
    """A correct answer."""
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *more,
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return whole(b"elsewhere", f"Location: {to}", status=status)


class Listener:
    """Answers each connection with what `reply(path)` returns.

    That is bytes, or an iterable of bytes, sent until the client or the test closes.
    """

    def __init__(self, reply=lambda path: whole(b"a picture"), host="127.0.0.1", context=None):
        self.reply, self.context = reply, context
        self.heads: list[str] = []
        self.connections = 0
        self.closed = threading.Event()
        self.socket = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.set()
        self.socket.close()

    def url(self, path="/cat.png", host="127.0.0.1"):
        return f"http://{host}:{self.port}{path}"

    def _accept(self):
        # OSError: the test has closed the socket.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self.connections += 1
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with contextlib.suppress(OSError), connection:
            connection.settimeout(30)
            if self.context is not None:
                connection = self.context.wrap_socket(connection, server_side=True)
            head = b""
            while b"\r\n\r\n" not in head:
                more = connection.recv(65536)
                if not more:
                    return
                head += more
            self.heads.append(head.decode())
            reply = self.reply(head.split()[1].decode())
            for piece in [reply] if isinstance(reply, bytes) else reply:
                connection.sendall(piece)
                if self.closed.is_set():
                    return
