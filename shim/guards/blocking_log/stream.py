"""What is under a text stream of the server in the place of its own buffer: it hands the bytes over, and never waits."""

from __future__ import annotations

import functools
import io
from typing import Any

from .writer import Writer


class LogBuffer(io.BufferedIOBase):
    """The binary buffer of sys.stderr. Of the old one, `old`, it takes the name and the descriptor."""

    # TextIOWrapper asks these while it takes us in. Functions of C: no other thread comes in between and finds the
    # stream without a buffer.
    seekable = staticmethod(bool)
    writable = staticmethod(functools.partial(bool, True))

    def __init__(self, writer: Writer, old: Any) -> None:
        self.writer = writer
        self.old = old  # held: a buffer that nothing holds closes its descriptor
        self.name = getattr(old, "name", "<stderr>")
        self.mode = getattr(old, "mode", "wb")
        self._silent = False

    def write(self, data: Any, /) -> int:
        """Take all of it. In a child of a fork, write it there and then, and raise OSError as stock does."""
        data = data if type(data) is bytes else bytes(memoryview(data))
        if self._silent:
            self.writer.lose(data)
        elif self.writer.at_work:
            self.writer.put(data)
        else:
            self.writer.write_here(data)
        return len(data)

    def flush(self) -> None:
        """What was written is on its way; no caller may have to wait for it."""

    def close(self) -> None:
        """A stream that is closed raises ValueError at each line, and that costs the request: lose the lines instead."""
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
