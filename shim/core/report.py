"""What the shim says: single lines on stderr, and the state of each guard. Nothing ever goes to stdout."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, Protocol

PREFIX = "mlx-lm-shim: "
# A write of at most this many bytes to a pipe that select() calls writable does not block (POSIX: PIPE_BUF is >= 512).
_ATOMIC = 512

Kind = Literal["active", "degraded", "retired", "off", "incompatible", "failed"]
KINDS: tuple[Kind, ...] = ("active", "degraded", "off", "retired", "incompatible", "failed")


@dataclass(frozen=True)
class State:
    """What became of a guard: the kind, and the reason in words where there is one."""

    kind: Kind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


class Log(Protocol):
    """Writes to stderr in the place of its callers: the guard blocking_log."""

    def put(self, data: bytes) -> None:
        """Have it written. Never waits and never raises."""

    def flush(self, seconds: float) -> bool:
        """Wait until what was put is written, or known to be lost: at most so long. Whether it is."""


states: dict[str, State] = {}
# None where lines are written by whoever has something to say.
log: Log | None = None
_debug = False
_said: set[str] = set()


def version_of(package: str) -> str:
    """The installed version, or "unknown": a source checkout has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def failed(guard: str, why: str) -> None:
    """A guard that is at work turns out not to be able to: its state, and a line, once."""
    if states.get(guard, State("active")).kind != "failed":
        states[guard] = State("failed", why)
        line(f"{guard} failed: {why}")


def enable_debug() -> None:
    global _debug
    _debug = True


def one_line(text: object, limit: int = 300) -> str:
    """`text` on one line of at most `limit` characters. An exception whose own __str__ fails gives its type."""
    try:
        flat = " ".join(str(text).split())
    except Exception:
        flat = f"<{type(text).__name__} that cannot be shown>"
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def line(text: str) -> None:
    """Write one line to stderr. A stderr that is closed or broken is no reason to fail."""
    _write(_encode(f"{PREFIX}{one_line(text, 2000)}\n"))


def once(text: str) -> None:
    """As `line`, the first time that it is said."""
    if text not in _said:
        _said.add(text)
        line(text)


@contextlib.contextmanager
def contained(what: str, tell: Callable[[str], None] = once) -> Iterator[None]:
    """Report an exception in the block as "`what`: exception", and go on after the block.

    For a step of the shim in a thread of stock: an exception there would end that thread.
    """
    try:
        yield
    except Exception as error:
        tell(f"{what}: {error!r}")


def debug(text: str) -> None:
    """As `line`, with MLX_SHIM_DEBUG=1 only."""
    if _debug:
        line(text)


def line_nowait(text: str) -> None:
    """As `line`, but give up rather than wait for a reader: for a process that is about to end."""
    if log is not None:
        line(text)
    else:
        line_at_end(text)


def flush(seconds: float) -> bool:
    """Wait, at most so long, until all that was said is written. Whether it is, or cannot be."""
    return log is None or log.flush(seconds)


def line_at_end(text: str) -> None:
    """As `line`, in this thread, past all that still waits, and only where a reader takes it now."""
    fd = stderr_fd()
    if fd is not None and select.select([], [fd], [], 0)[1]:
        _write_here(fd, _encode(PREFIX + one_line(text))[: _ATOMIC - 1] + b"\n")


def _encode(text: str) -> bytes:
    """A name or a message may hold what is no UTF-8."""
    return text.encode(errors="backslashreplace")


def stderr_fd() -> int | None:
    """The descriptor of the real stderr, or None: with stderr closed, number 2 may by now be a model file or a socket."""
    try:
        return None if sys.__stderr__ is None else sys.__stderr__.fileno()
    except (OSError, ValueError):  # closed, or replaced by something without a descriptor
        return None


def _write(data: bytes) -> None:
    fd = stderr_fd()
    if fd is None:
        return
    if log is not None:
        log.put(data)
    else:
        _write_here(fd, data)


def _write_here(fd: int, data: bytes) -> None:
    try:
        # Past sys.stderr's buffer and lock: a thread that died holding it must not stop us.
        os.write(fd, data)
    except OSError:
        return  # nobody reads it any more, and there is nowhere else to say so
