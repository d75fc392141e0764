"""Tells systemd, or whoever else listens on NOTIFY_SOCKET, how the service is: the protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket

LOADING = 1800.0  # seconds for which a model that loads counts as sound: nothing tells a slow load from one that hangs


def address() -> str | None:
    """Where to send, or None: nobody asks. An abstract name is written with an @ in front."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    return ("\0" + name[1:] if name[0] == "@" else name) if name[:1] in ("/", "@") else None


def send(**assignments: str | int) -> None:
    """Send these in one datagram. OSError where it cannot be delivered now: a listener that does not read is not waited for."""
    to = address()
    if to is None:
        raise OSError("NOTIFY_SOCKET names no UNIX socket")
    lines = "\n".join(
        f"{name}={str(value).replace(chr(10), ' ')}" for name, value in assignments.items()
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.setblocking(False)
        s.sendto(lines.encode(errors="backslashreplace"), to)


def watchdog_interval() -> float | None:
    """Seconds between two signs of life: half of what WATCHDOG_USEC allows. None where none are wanted of this process.

    ValueError where WATCHDOG_USEC is no number above zero.
    """
    given = os.environ.get("WATCHDOG_USEC")
    if not given or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (given.isascii() and given.isdecimal() and int(given)):
        raise ValueError(
            f"WATCHDOG_USEC={given[:40]!r} is not valid; accepted: microseconds, a whole number above 0"
        )
    return int(given) / 2e6
