"""A client that trickles its request, or stops sending it, holds a thread of the server for ever.

Here headers must be in within MLX_SHIM_READ_TIMEOUT, and a body must keep up 500 bytes a second beyond it: else the
connection is closed, where the headers were complete with 408. A client that reads a stream slowly is left alone.
"""

from __future__ import annotations

import io
import select
import socket
import time
from typing import Any

from ..core import answers, patch, settings
from ..core.errors import ShimError
from ..core.verdicts import require

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2: 300 idle connections hold 300 threads"
MODULE = "mlx_lm.server"
SETTINGS = ("read_timeout",)

# Bytes a second below which a body is too slow once READ_TIMEOUT is over, as Apache's mod_reqtimeout has it.
MIN_RATE = 500


def probe(server: Any) -> None:
    require(server, "APIHandler.setup", "APIHandler.do_POST")


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler.setup", _setup)
    patch.wrap(server, "APIHandler.do_POST", _do_post)


def _setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    instance._shim_reader = DeadlineReader(instance.connection, settings.current.read_timeout)
    instance.rfile.close()
    instance.rfile = io.BufferedReader(instance._shim_reader, 1 << 16)
    return result


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    instance._shim_reader.start_body()
    try:
        return wrapped(*args, **kwargs)
    except _TooSlow:
        limit = f"{settings.current.read_timeout:g} s"
        answers.refuse(
            instance, ShimError(408, "request_timeout", f"the body was not sent within {limit}")
        )
        return None


class _TooSlow(TimeoutError):
    """The client did not send its headers, or went on with its body, in time. http.server closes the connection."""


class DeadlineReader(io.RawIOBase):
    """A connection's incoming bytes: the headers within `seconds` in all, a body at MIN_RATE beyond that."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._rate: int | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def start_body(self) -> None:
        """The headers are in: a new deadline, which moves with what arrives."""
        self._deadline = time.monotonic() + self._seconds
        self._rate = MIN_RATE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = self._deadline - time.monotonic()
        if left <= 0 or not self._poll.poll(left * 1000):
            raise _TooSlow("the client was too slow in sending its request")
        count = self._connection.recv_into(buffer)
        if self._rate is not None:
            self._deadline += count / self._rate
        return count
