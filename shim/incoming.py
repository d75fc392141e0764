"""What a client sends, read with a deadline: a slow or silent client must not hold a thread for ever."""

from __future__ import annotations

import io
import select
import socket
import time

# Bytes a second below which a body is too slow once READ_TIMEOUT is over, as Apache's mod_reqtimeout has it.
MIN_RATE = 500


class TooSlow(TimeoutError):
    """The client did not send its headers, or went on with its body, in time. http.server closes the connection."""


class Incoming(io.RawIOBase):
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
            raise TooSlow("the client was too slow in sending its request")
        count = self._connection.recv_into(buffer)
        if self._rate is not None:
            self._deadline += count / self._rate
        return count
