"""A log that cannot be written costs requests: all of them, /health included.

Stock writes its access line to stderr before the status line. With the reader of the pipe gone, the stream closed, the
disk full or the terminal gone, that write fails and the client gets no byte; with a pipe that is not read, it blocks
as soon as the pipe is full (64 KiB on Linux). Stock's `logging` blocks there as well, in the generation thread too.
Here what goes to stderr waits in memory, at most MLX_SHIM_LOG_QUEUE bytes, and one thread writes it, in order.
Only that thread waits for a reader. Lines that cannot be written are counted, in /health (`lost_log_lines`), and a line
says how many once writing works again.

The streams stay the objects that they were, so a handler or a program that holds one is covered. stderr is covered, and
stdout where a handler of `logging` writes to it. The descriptor stays as it is, for faulthandler and for subprocesses. A
child of a fork writes as before. A stream that a program puts in the place of sys.stderr, and that does not write to
descriptor 1 or 2, is left to the program.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import time
from typing import Any

from ...core import report, settings
from ...engine import observe
from ...engine.state import engine
from .stream import LogBuffer
from .writer import Writer

UPSTREAM = "no issue known; http.server logs before it answers"
MODULE = "mlx_lm.server"
SETTINGS = ("log_queue",)

# The key among the counters of /health.
COUNTER = "lost_log_lines"
# For what still waits when the interpreter ends by itself.
EXIT_LIMIT = 1.0  # seconds
_STANDARD = (1, 2)

_writers: list[Writer] = []


def probe(server: Any) -> None:
    """Nothing to try: that a write to a full pipe blocks is no fault of stock that a release could cure alone."""


def apply(server: Any) -> None:
    observe.before_start.append(start)


def start() -> None:
    """Have the streams of this process written by a thread. Called whenever a server starts; the first call does it."""
    engine.counters.setdefault(COUNTER, 0)
    try:
        for stream in _streams():
            _cover(stream)
        _replace_missing()
    except Exception as error:
        report.failed("blocking_log", report.one_line(error))
    fd = report.stderr_fd()
    written = [w for w in _writers if w.at_work and fd is not None and w.fd == fd]
    report.log = written[0] if written else None
    if not isinstance(_buffer(sys.stderr), LogBuffer):
        report.once(
            "blocking_log: sys.stderr is an object of the program, which writes its lines itself"
        )


def _streams() -> list[Any]:
    """The text streams to cover, each once."""
    found = [sys.stderr, sys.__stderr__]
    if any(getattr(handler, "stream", None) is sys.stdout for handler in _handlers()):
        found.append(sys.stdout)
    return list({id(stream): stream for stream in found if stream is not None}.values())


def _handlers() -> list[logging.Handler]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return [handler for logger in loggers for handler in getattr(logger, "handlers", ())]


def _buffer(stream: Any) -> Any:
    """What a text stream writes to; None where it is no text stream, or the program has taken its buffer away."""
    try:
        return stream.buffer if isinstance(stream, io.TextIOWrapper) else None
    except ValueError:
        return None


def _cover(stream: Any) -> None:
    """Put a LogBuffer under a text stream. Text that the stream holds back stays in it."""
    old = _buffer(stream)
    if isinstance(old, LogBuffer):
        old.writer.start()  # again, where a child of a fork has become a server itself
        return
    if old is None:
        return
    try:
        fd = None if stream.closed else stream.fileno()
    except OSError:  # it writes to memory
        return
    if fd not in (*_STANDARD, None):
        return
    attributes = _attributes(stream)
    buffer = LogBuffer(_writer_for(fd), old)
    try:
        stream.__init__(buffer, **attributes)
    except Exception:
        stream.__init__(old, **attributes)
        raise


def _attributes(stream: io.TextIOWrapper) -> dict[str, Any]:
    return {
        "encoding": stream.encoding,
        "errors": stream.errors,
        "newline": "\n" if os.linesep == "\n" else None,
        "line_buffering": stream.line_buffering,
        "write_through": stream.write_through,
    }


def _replace_missing() -> None:
    """Where stderr was closed as Python started there is no stream, and stock's access line ends the request.

    So it does where the program has taken the buffer from the stream.
    """
    stream = sys.stderr
    if stream is not None and (_buffer(stream) or not isinstance(stream, io.TextIOWrapper)):
        return
    buffer = LogBuffer(_writer_for(None), None)
    sys.stderr = io.TextIOWrapper(buffer, "utf-8", "backslashreplace", "\n", line_buffering=True)
    for handler in _handlers():
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
            handler.stream = sys.stderr


def _writer_for(fd: int | None) -> Writer:
    """One for each file: stdout and stderr are often the same, and then keep one order."""
    for known in _writers:
        if known.fd == fd or (None not in (known.fd, fd) and _is_same_file(known.fd, fd)):
            return known
    writer = Writer(fd, settings.current.log_queue, _note)
    writer.start()
    if not _writers:
        atexit.register(_end)
        os.register_at_fork(after_in_child=_leave_alone)
    _writers.append(writer)
    return writer


def _is_same_file(one: int | None, other: int | None) -> bool:
    try:
        return os.path.sameopenfile(one, other)  # type: ignore[arg-type]
    except OSError:
        return False


def _note(lines: int) -> None:
    engine.counters[COUNTER] += lines


def _leave_alone() -> None:
    """In a child of a fork: it has no thread of ours, and what waits is the parent's."""
    report.log = None
    for writer in _writers:
        writer.forget()


def _end() -> None:
    """The interpreter ends: its teardown stops our threads."""
    deadline = time.monotonic() + EXIT_LIMIT
    for writer in _writers:
        writer.end(deadline)
