"""The buffer that the guard puts under a text stream: it passes the bytes on, and never waits."""

from __future__ import annotations

import functools
import io
from typing import Any

from .writer import Writer


class LogBuffer(io.BufferedIOBase):
    """The binary buffer of sys.stderr, with the name and the descriptor of the old one."""

    # TextIOWrapper calls these while its buffer is replaced. They are functions of C, so that no
    # other thread runs in between and finds the stream without a buffer.
    seekable = staticmethod(bool)
    writable = staticmethod(functools.partial(bool, True))

    def __init__(self, writer: Writer, old: Any) -> None:
        self.writer = writer
        # A buffer without references closes its descriptor, so this one keeps the old one.
        self.old = old
        self.name = getattr(old, "name", "<stderr>")
        self.mode = getattr(old, "mode", "wb")
        self._silent = False

    def write(self, data: Any, /) -> int:
        """Take all of it. A child of a fork writes it at once, and raises OSError as stock does."""
        data = data if type(data) is bytes else bytes(memoryview(data))
        if self._silent:
            self.writer.lose(data)
        elif self.writer.at_work:
            self.writer.put(data)
        else:
            self.writer.write_here(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: the thread of the writer has the bytes, and no caller may wait for it."""

    def close(self) -> None:
        """Lose every line from now on: a closed stream would raise ValueError at each request."""
        self._silent = True

    @property
    def closed(self) -> bool:
        return False

    @property
    def raw(self) -> Any:
        return getattr(self.old, "raw", self.old)

    def fileno(self) -> int:
        if self.old is None:
            raise io.UnsupportedOperation("fileno")
        if self._silent:
            raise ValueError("I/O operation on closed file")
        return int(self.old.fileno())

    def isatty(self) -> bool:
        return self.old is not None and bool(self.old.isatty())
