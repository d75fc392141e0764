"""The queue of a log, bounded in bytes, and the one thread that writes it and may wait for a reader alone.

`put` takes no lock: it is called in handlers of signals, in __del__ and in callbacks of weak references, and each may
come in the midst of another `put` of the same thread. The queue is one bytearray: `extend`, `del` of its front and `len`
are each one step of the interpreter, and so is the release of the lock that wakes the thread.
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

# The text that says how many lines are lost has room beside what is written in one call.
_NOTICE = 160  # bytes
# A pipe takes so many bytes whole, or not at all: a line that is written past us is not put in the middle of ours.
_CHUNK = select.PIPE_BUF - _NOTICE
RETRY = 0.1  # seconds
# After the first line the thread waits so long for more: it then runs once for several lines, and seldom in the midst of
# an answer. Without it a request of 650 us takes 28 us longer, with it 5 (tests/bench/blocking_log.py).
PAUSE = 0.01  # seconds
_TOO_SLOW = "the log was read or written too slowly"


class Writer:
    """Writes what is put, in order, to descriptor `fd`; None is nowhere. `note(lines)` is told what is lost."""

    def __init__(self, fd: int | None, limit: int, note: Callable[[int], None]) -> None:
        self.fd = fd
        self._fd = -1 if fd is None else fd
        self._limit = limit
        self._note = note
        self._waiting = bytearray()
        self._out = 0  # bytes taken from the queue, written or lost
        self._full = False  # no line is taken until half of the queue is free
        self._whole = True  # the last piece that was put ended a line
        self._taken_whole = True  # the last piece that was taken did
        self._unsaid = 0  # lines that found no room, and of which no line has told
        self._failed = 0  # likewise, lines that could not be written
        self._why = ""
        self._wake = threading.Lock()  # released where there is something to write
        self._hurry = threading.Lock()  # released where that must not wait for more
        self._flushes: collections.deque[tuple[int, threading.Lock]] = collections.deque()
        self._ends_at: float | None = None  # by time.monotonic
        self.at_work = False

    def start(self) -> None:
        """Start the thread, where there is none. Raises RuntimeError where the system has no thread left."""
        if self.at_work:
            return
        self._wake, self._hurry = threading.Lock(), threading.Lock()
        if self.fd is not None:
            threading.Thread(target=self._run, name="mlx-shim-log", daemon=True).start()
        self.at_work = True

    def forget(self) -> None:
        """In a child of a fork: there is no thread, and nothing of the parent's to write."""
        self.at_work = False
        self._waiting.clear()
        self._flushes.clear()
        self._full, self._whole, self._taken_whole = False, True, True
        self._unsaid = self._failed = 0

    def put(self, data: bytes) -> None:
        """Have it written. Never waits and never raises."""
        try:
            self._put(data)
        except Exception:  # MemoryError
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
        """Wait until what was put before is written, or known to be lost: at most so long. Whether it is."""
        if not self.at_work or self.fd is None or not self._waiting:
            return not self._waiting
        done = threading.Lock()
        done.acquire()
        self._flushes.append((self._out + len(self._waiting), done))
        _release(self._wake)
        _release(self._hurry)
        return done.acquire(timeout=max(0, seconds))

    def end(self, deadline: float) -> None:
        """The interpreter's teardown stops the thread. What comes after this is written by its caller, until the deadline."""
        if not self.at_work:
            return
        self.flush(deadline - time.monotonic())
        self._ends_at = deadline

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            # A program may let SIGPIPE end the process: for a line of the log it should not.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        while True:
            self._wake.acquire()
            self._hurry.acquire(timeout=PAUSE)
            while self._waiting:
                try:
                    self._write_some()
                except Exception:  # MemoryError; or closed while we waited for it
                    self._wake.acquire(timeout=RETRY)
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
        data = bytes(self._waiting[:_CHUNK])
        end = data.rfind(b"\n") + 1
        data = data[:end] if end else data
        try:
            if self._failed:
                os.write(self._fd, _notice(self._failed, self._why))
                self._failed = 0
            written = os.write(self._fd, data)
        except BlockingIOError:  # another process that shares the file has made it so
            select.select([], [self._fd], [])
            return
        except Exception as error:
            self._why = getattr(error, "strerror", None) or repr(error)
            self._failed += _lines(data)
            self.lose(data)
            written = len(data)
        self._out += (
            written  # first: a flush that comes in between waits too long rather than too short
        )
        del self._waiting[:written]

    def _told(self) -> bytes:
        lost, self._unsaid = self._unsaid, 0
        begin = b"" if self._taken_whole else b"\n"
        return begin + _notice(lost, _TOO_SLOW) if lost else b""

    def _cut(self, data: bytes) -> bytes:
        """A line that alone is longer than the queue: its first half a queue."""
        self.lose(b"\n")
        kept = self._limit // 2
        return data[:kept] + b" ... %d bytes are cut off here\n" % (len(data) - kept)

    def _write_until(self, data: bytes, deadline: float) -> None:
        """Write in this thread, in pieces that do not block, as long as there is time."""
        if self._waiting:  # the thread is stuck, or gone in the middle of it
            self.lose(data)
            return
        try:
            while data:
                left = max(0, deadline - time.monotonic())
                if not select.select([], [self._fd], [], left)[1]:
                    self.lose(data)
                    return
                data = data[os.write(self._fd, data[:_CHUNK]) :]
        except OSError:
            self.lose(data)


def _release(lock: threading.Lock) -> None:
    if lock.locked():
        with contextlib.suppress(RuntimeError):  # another thread has just done it
            lock.release()


def _ends_line(data: bytes) -> bool:
    return data.endswith((b"\n", b"\r"))


def _lines(data: bytes) -> int:
    """A progress bar ends its lines otherwise."""
    return data.count(b"\n") or data.count(b"\r")


def _notice(lines: int, why: str) -> bytes:
    text = f"{report.PREFIX}{lines} lines of the log are lost here: {why}"
    return text.encode(errors="backslashreplace")[: _NOTICE - 2] + b"\n"
