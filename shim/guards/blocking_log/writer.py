"""The queue of a log, limited in bytes, and the thread that writes it. Only that thread may wait.

`put` takes no lock. Handlers of signals, __del__ and callbacks of weak references call it, and each
may interrupt another `put` of the same thread. The queue is one bytearray: `extend`, `del` of its
front and `len` are each one step of the interpreter, and so is the release of the lock that wakes
the thread.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from ...core import report

# The most bytes of the notice that says how many lines are lost.
_NOTICE_BYTES = 160
# The most bytes of lines in one write. A pipe takes so many, and a notice, whole or not at all: a
# line that another writer writes does not land in the middle of one of these.
_CHUNK_BYTES = select.PIPE_BUF - _NOTICE_BYTES
# Seconds until the thread tries again after a failure that is not of the file.
RETRY_SECONDS = 0.1
# Seconds that the thread waits for more lines after the first: it then runs once for several lines,
# and seldom in the middle of an answer. Without this pause a request of 650 us takes 28 us longer,
# with it 5 (tests/bench/blocking_log.py).
PAUSE_SECONDS = 0.01
_TOO_SLOW = "the log was read or written too slowly"


class Writer:
    """Writes what is put, in order, to the descriptor `fd`; None means nowhere.

    It calls `note(lines)` with the number of lines that it loses.
    """

    def __init__(self, fd: int | None, limit: int, note: Callable[[int], None]) -> None:
        self.fd = fd
        self._fd = -1 if fd is None else fd
        self._limit = limit
        self._note = note
        self._waiting = bytearray()
        # Bytes that have left the queue, written or lost.
        self._out = 0
        # Whether the queue was full. It then takes no line until half of it is free.
        self._full = False
        # Whether the last piece that was put ended a line, and the last one that the queue took.
        self._whole = True
        self._taken_whole = True
        # Lines that found no room, and lines that could not be written, with the reason. No notice
        # has told of them yet.
        self._unsaid = 0
        self._failed = 0
        self._why = ""
        # Released if there is something to write, and if that must not wait for more lines.
        self._wake = threading.Lock()
        self._hurry = threading.Lock()
        # For each flush under way: what _out must reach, and a lock that is then released.
        self._flushes: collections.deque[tuple[int, threading.Lock]] = collections.deque()
        # From the end of the interpreter on: until when callers write, by time.monotonic.
        self._ends_at: float | None = None
        self.at_work = False

    def start(self) -> None:
        """Start the thread if there is none. Raises RuntimeError if none can be started."""
        if self.at_work:
            return
        self._wake, self._hurry = threading.Lock(), threading.Lock()
        if self.fd is not None:
            threading.Thread(target=self._run, name="mlx-shim-log", daemon=True).start()
        self.at_work = True

    def forget(self) -> None:
        """Called in a child of a fork: it has no thread, and the parent writes what waits."""
        self.at_work = False
        self._waiting.clear()
        self._flushes.clear()
        self._full, self._whole, self._taken_whole = False, True, True
        self._unsaid = self._failed = 0

    def put(self, data: bytes) -> None:
        """Have `data` written. Never waits and never raises."""
        try:
            self._put(data)
        # MemoryError, most likely.
        except Exception:
            self.lose(data)

    def _put(self, data: bytes) -> None:
        if self.fd is None:
            self.lose(data)
            return
        if self._ends_at is not None:
            self._write_until(data, self._ends_at)
            return
        size, begins_line = len(self._waiting), self._whole
        self._whole = _ends_line(data)
        if self._full and begins_line and size <= self._limit // 2:
            self._full = False
        if size + len(data) > self._limit:
            if not size and begins_line:
                data = self._cut(data)
            else:
                self._full = True
        if self._full:
            self._unsaid += _lines(data)
            self.lose(data)
            return
        if self._unsaid:
            data = self._told() + data
        self._taken_whole = _ends_line(data)
        self._waiting.extend(data)
        _release(self._wake)
        if size > self._limit // 2:
            _release(self._hurry)

    def lose(self, data: bytes) -> None:
        self._note(_lines(data))

    def write_here(self, data: bytes) -> None:
        """Write all of it in this thread. Raises OSError."""
        while data and self.fd is not None:
            data = data[os.write(self._fd, data) :]

    def flush(self, seconds: float) -> bool:
        """Wait, for at most `seconds`, until what was put before is written or known to be lost.

        Returns whether that is so.
        """
        if not self.at_work or self.fd is None or not self._waiting:
            return not self._waiting
        done = threading.Lock()
        done.acquire()
        self._flushes.append((self._out + len(self._waiting), done))
        _release(self._wake)
        _release(self._hurry)
        return done.acquire(timeout=max(0, seconds))

    def end(self, deadline: float) -> None:
        """Flush until `deadline`, and have callers write from now on, until then.

        The teardown of the interpreter stops the thread.
        """
        if not self.at_work:
            return
        self.flush(deadline - time.monotonic())
        self._ends_at = deadline

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            # A program may let SIGPIPE end the process. A line of the log should not end it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        while True:
            self._wake.acquire()
            self._hurry.acquire(timeout=PAUSE_SECONDS)
            while self._waiting:
                try:
                    self._write_some()
                # MemoryError; or the descriptor was closed while this thread waited for it.
                except Exception:
                    self._wake.acquire(timeout=RETRY_SECONDS)
                self._answer_flushes()
            if self._unsaid and self._whole:
                self._full = False
                self._waiting.extend(self._told())
                _release(self._wake)
            self._answer_flushes()

    def _answer_flushes(self) -> None:
        while self._flushes and (not self._waiting or self._out >= self._flushes[0][0]):
            self._flushes.popleft()[1].release()

    def _write_some(self) -> None:
        """Write the next lines, or a piece of a long one."""
        data = bytes(self._waiting[:_CHUNK_BYTES])
        end = data.rfind(b"\n") + 1
        data = data[:end] if end else data
        try:
            if self._failed:
                os.write(self._fd, _notice(self._failed, self._why))
                self._failed = 0
            written = os.write(self._fd, data)
        # Another process that shares the file has made it non-blocking.
        except BlockingIOError:
            select.select([], [self._fd], [])
            return
        except Exception as error:
            self._why = getattr(error, "strerror", None) or repr(error)
            self._failed += _lines(data)
            self.lose(data)
            written = len(data)
        # First: a flush that begins between the two then waits too long rather than too short.
        self._out += written
        del self._waiting[:written]

    def _told(self) -> bytes:
        lost, self._unsaid = self._unsaid, 0
        begin = b"" if self._taken_whole else b"\n"
        return begin + _notice(lost, _TOO_SLOW) if lost else b""

    def _cut(self, data: bytes) -> bytes:
        """Cut a line that is longer than the queue to the length of half a queue."""
        self.lose(b"\n")
        kept = self._limit // 2
        return data[:kept] + b" ... %d bytes are cut off here\n" % (len(data) - kept)

    def _write_until(self, data: bytes, deadline: float) -> None:
        """Write in the calling thread, in pieces that do not block, as long as there is time."""
        # The thread is stuck, or was stopped in the middle of a write.
        if self._waiting:
            self.lose(data)
            return
        try:
            while data:
                left = max(0, deadline - time.monotonic())
                if not select.select([], [self._fd], [], left)[1]:
                    self.lose(data)
                    return
                data = data[os.write(self._fd, data[:_CHUNK_BYTES]) :]
        except OSError:
            self.lose(data)


def _release(lock: threading.Lock) -> None:
    if lock.locked():
        # Another thread may just have released it.
        with contextlib.suppress(RuntimeError):
            lock.release()


def _ends_line(data: bytes) -> bool:
    return data.endswith((b"\n", b"\r"))


def _lines(data: bytes) -> int:
    """Count the lines. A progress bar ends its lines with a carriage return."""
    return data.count(b"\n") or data.count(b"\r")


def _notice(lines: int, why: str) -> bytes:
    return _line(f"{lines} lines of the log are lost here: {why}")


def _line(text: str) -> bytes:
    line = (report.PREFIX + text).encode(errors="backslashreplace")
    return line[: _NOTICE_BYTES - 2] + b"\n"
