"""Writes the shim's lines to stderr, and keeps the state of each guard. Never uses stdout."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

PREFIX = "mlx-lm-shim: "
# If select() says that a pipe is writable, a write of at most this many bytes does not block
# (POSIX: PIPE_BUF is >= 512).
_ATOMIC_BYTES = 512

Kind = Literal["active", "degraded", "retired", "off", "incompatible", "failed"]
KINDS: tuple[Kind, ...] = ("active", "degraded", "off", "retired", "incompatible", "failed")


@dataclass(frozen=True)
class State:
    """The state of a guard: its kind, and the reason in words where there is one."""

    kind: Kind
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


states: dict[str, State] = {}
_debug = False
_said: set[str] = set()


def version_of(package: str) -> str:
    """Return the installed version, or "unknown": a source checkout has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def mark_failed(guard: str, why: str) -> None:
    """Set the state of a guard to failed, and say so in one line, once."""
    if states.get(guard, State("active")).kind != "failed":
        states[guard] = State("failed", why)
        line(f"{guard} failed: {why}")


def enable_debug() -> None:
    """Make `debug` write its lines."""
    global _debug
    _debug = True


def one_line(text: object, limit: int = 300) -> str:
    """Return `text` on one line of at most `limit` characters.

    For an exception whose own __str__ fails it returns the type.
    """
    try:
        flat = " ".join(str(text).split())
    except Exception:
        flat = f"<{type(text).__name__} that cannot be shown>"
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def line(text: str) -> None:
    """Write one line to stderr. Never raises, even if stderr is closed or broken."""
    _write(_encode(f"{PREFIX}{one_line(text, 2000)}\n"))


def once(text: str) -> None:
    """Write a line, unless the same line was written before by this function."""
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
    """Write a line, with MLX_SHIM_DEBUG=1 only."""
    if _debug:
        line(text)


def line_nowait(text: str) -> None:
    """Write a line if that is possible without waiting for a reader.

    For a process that is about to end.
    """
    fd = stderr_fd()
    if fd is not None and select.select([], [fd], [], 0)[1]:
        _write(_encode(PREFIX + one_line(text))[: _ATOMIC_BYTES - 1] + b"\n")


def _encode(text: str) -> bytes:
    """Encode a line. A name or a message in it may hold characters that UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace")


def stderr_fd() -> int | None:
    """Return the descriptor of the real stderr, or None if stderr is closed.

    With stderr closed, descriptor 2 may by now be a model file or a socket.
    """
    try:
        return None if sys.__stderr__ is None else sys.__stderr__.fileno()
    except (OSError, ValueError):
        # It is closed, or an object without a descriptor has replaced it.
        return None


def _write(data: bytes) -> None:
    fd = stderr_fd()
    if fd is None:
        return
    # os.write does not take the lock of sys.stderr: a thread that died with the lock must not
    # block the shim.
    try:
        os.write(fd, data)
    except OSError:
        # No one reads stderr any more, and there is no other place to say so.
        return
