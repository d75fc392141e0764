"""A client that sends its request slowly, or stops sending it, holds a thread without a time limit.

Here the headers must arrive within MLX_SHIM_READ_TIMEOUT. A body has the same time, and more as
long as it arrives at 500 bytes a second. Otherwise the connection is closed, with 408 if the
headers were complete. A client that reads a stream slowly is left alone.
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

# A body below this rate is too slow once MLX_SHIM_READ_TIMEOUT is over. Apache's mod_reqtimeout has
# the same rate.
MIN_BYTES_PER_SECOND = 500


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
    """The client did not send its headers or body in time; http.server closes the connection."""


class DeadlineReader(io.RawIOBase):
    """Reads a connection, within `seconds` for the headers.

    A body gets `seconds` too, and more at MIN_BYTES_PER_SECOND.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._rate: int | None = None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def start_body(self) -> None:
        """The headers are complete: set a new deadline, which moves as bytes arrive."""
        self._deadline = time.monotonic() + self._seconds
        self._rate = MIN_BYTES_PER_SECOND

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
