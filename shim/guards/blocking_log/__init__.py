"""If the log cannot be written, no request is answered, not even /health.

Stock writes its access line to stderr before the status line. If the reader of the pipe has gone,
the stream is closed, the disk is full or the terminal has gone, that write fails and the client
gets no byte. If no one reads the pipe, the write blocks as soon as the pipe is full (64 KiB on
Linux). Stock's `logging` blocks there too, even in the generation thread.

Here what goes to stderr waits in memory, at most MLX_SHIM_LOG_QUEUE bytes, and one thread writes
it, in order. Only that thread waits for a reader. The guard counts the lines that cannot be
written, in /health (`lost_log_lines`), and a line says how many once writing works again.

The streams stay the same objects, so a handler or a program that holds one is covered. The guard
covers stderr, and stdout where a handler of `logging` writes to it. The descriptor stays as it is,
for faulthandler and for subprocesses. A child of a fork writes as before. If a program replaces
sys.stderr by a stream that does not write to descriptor 1 or 2, the guard leaves that stream alone.
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
# Seconds for the lines that still wait when the interpreter ends by itself.
EXIT_LIMIT = 1.0
# The descriptors that are covered.
_STANDARD = (1, 2)

# One for each file.
_writers: list[Writer] = []


def probe(server: Any) -> None:
    """Nothing to try: a write to a full pipe blocks on every release."""


def apply(server: Any) -> None:
    observe.before_start.append(start)


def start() -> None:
    """Have a thread write the streams of this process. Each start of a server calls this."""
    engine.counters.setdefault(COUNTER, 0)
    try:
        for stream in _streams():
            _cover(stream)
        _replace_missing()
    except Exception as error:
        report.mark_failed("blocking_log", report.one_line(error))
    fd = report.stderr_fd()
    written = [w for w in _writers if w.at_work and fd is not None and w.fd == fd]
    report.log = written[0] if written else None
    if not isinstance(_buffer(sys.stderr), LogBuffer):
        report.once(
            "blocking_log: sys.stderr is an object of the program, which writes its lines itself"
        )


def _streams() -> list[Any]:
    """List the text streams to cover, each once."""
    found = [sys.stderr, sys.__stderr__]
    if any(getattr(handler, "stream", None) is sys.stdout for handler in _handlers()):
        found.append(sys.stdout)
    return list({id(stream): stream for stream in found if stream is not None}.values())


def _handlers() -> list[logging.Handler]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return [handler for logger in loggers for handler in getattr(logger, "handlers", ())]


def _buffer(stream: Any) -> Any:
    """Return the buffer of a text stream; None if the program has detached it, or wrote its own."""
    try:
        return stream.buffer if isinstance(stream, io.TextIOWrapper) else None
    except ValueError:
        return None


def _cover(stream: Any) -> None:
    """Put a LogBuffer under a text stream. Text that the stream has not passed on stays in it."""
    old = _buffer(stream)
    if isinstance(old, LogBuffer):
        # A child of a fork has become a server itself, and has no thread yet.
        old.writer.start()
        return
    if old is None:
        return
    try:
        fd = None if stream.closed else stream.fileno()
    # It writes to memory.
    except OSError:
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
    """Make a sys.stderr if there is none that can be written: stock's access line needs one.

    There is none if stderr was closed when Python started, or if the program has detached the
    buffer of the stream.
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
    """Return the writer of a file. If stdout and stderr are one file, it is one writer."""
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
    """Called in a child of a fork: it has no thread of the shim. The parent writes what waits."""
    report.log = None
    for writer in _writers:
        writer.forget()


def _end() -> None:
    """Called when the interpreter ends: its teardown stops the threads of the writers."""
    deadline = time.monotonic() + EXIT_LIMIT
    for writer in _writers:
        writer.end(deadline)
