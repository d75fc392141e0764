"""Sends the state of the service to NOTIFY_SOCKET, by the protocol of sd_notify(3).

systemd listens there, or another supervisor.
"""

from __future__ import annotations

import os
import socket

# Seconds for which a load counts as healthy: the shim cannot tell a slow load from one that hangs.
LOADING_LIMIT = 1800.0


def address() -> str | None:
    """Return the address to send to, or None if no one listens.

    NOTIFY_SOCKET gives an abstract name with an @ in front.
    """
    name = os.environ.get("NOTIFY_SOCKET", "")
    return ("\0" + name[1:] if name[0] == "@" else name) if name[:1] in ("/", "@") else None


def send(**assignments: str | int) -> None:
    """Send the assignments in one datagram.

    Raises OSError if it cannot be delivered now: this function does not wait for the listener.
    """
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
    """Return the seconds between two signs of life: half of what WATCHDOG_USEC allows.

    None if the supervisor expects none from this process. Raises ValueError if WATCHDOG_USEC is not
    a number above zero.
    """
    given = os.environ.get("WATCHDOG_USEC")
    if not given or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (given.isascii() and given.isdecimal() and int(given)):
        raise ValueError(
            f"WATCHDOG_USEC={given[:40]!r} is not valid; "
            "accepted: microseconds, a whole number above 0"
        )
    return int(given) / 2e6
