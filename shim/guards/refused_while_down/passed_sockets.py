"""Listening sockets that a supervisor passes in: by systemd's sd_listen_fds(3), or from launchd.

The supervisor keeps them open while no server process lives, and the kernel queues connections.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
from collections.abc import MutableMapping
from typing import Any

from ...core import report

# The number of the first descriptor that is passed.
FIRST_FD = 3
# sd_listen_fds removes these from the environment: they do not concern this process's children.
VARIABLES = ("LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES")
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


class Unusable(Exception):
    """The server cannot serve on what was passed, or asked for, and why."""


def from_systemd(environ: MutableMapping[str, str] = os.environ) -> list[int]:
    """The descriptors passed to this process. Raises Unusable if LISTEN_FDS is invalid."""
    count, pid = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_PID", "")
    if pid.strip() != str(os.getpid()):
        if count:
            report.line(
                f"LISTEN_FDS is for the process {pid or 'none'} and this is {os.getpid()}: "
                "no socket is passed in"
            )
        return []
    for name in VARIABLES:
        environ.pop(name, None)
    if not re.fullmatch(r"[1-9]\d{0,3}", count.strip()):
        raise Unusable(f"LISTEN_FDS is {count[:20]!r}, which is not a number of sockets")
    return list(range(FIRST_FD, FIRST_FD + int(count)))


def from_launchd(name: str, library: Any = None) -> list[int]:
    """The descriptors of the sockets under the key `name` of the plist's Sockets.

    Raises Unusable if there are none. The documented signature is
    int launch_activate_socket(const char *name, int **fds, size_t *cnt): it returns 0 or an errno,
    and an array that the caller must free. Not verified on a Mac.
    """
    library = ctypes.CDLL(None) if library is None else library
    try:
        activate, free = library.launch_activate_socket, library.free
    except AttributeError:
        raise Unusable(
            f"the socket {name!r} should come from launchd, but this system has none"
        ) from None
    activate.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
        ctypes.POINTER(ctypes.c_size_t),
    ]
    activate.restype = ctypes.c_int
    free.argtypes, free.restype = [ctypes.c_void_p], None
    array, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    failed = activate(os.fsencode(name), ctypes.byref(array), ctypes.byref(count))
    if failed:
        why = {
            errno.ENOENT: "the plist's Sockets has no such key",
            errno.ESRCH: "launchd did not start this process",
        }
        raise Unusable(
            f"launchd passes no socket {name!r}: {why.get(failed) or os.strerror(failed)}"
        )
    fds = [array[index] for index in range(count.value)]
    free(array)
    if not fds:
        raise Unusable(f"launchd passes no socket {name!r}: there are none under that key")
    return fds


def opened(fds: list[int]) -> tuple[list[socket.socket], list[str]]:
    """The sockets that can be used, and in words why the others cannot. Children inherit none."""
    usable, reasons = [], []
    for fd in fds:
        try:
            usable.append(_open(fd))
        except Unusable as reason:
            reasons.append(f"descriptor {fd} {reason}")
        except OSError as error:
            reasons.append(f"descriptor {fd} is not a socket ({error.strerror})")
    return usable, reasons


def _open(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    opened = socket.socket(fileno=fd)
    why = ""
    if opened.family not in FAMILIES:
        why = f"is a socket of the family {opened.family}; wanted: IPv4, IPv6 or Unix"
    elif opened.type != socket.SOCK_STREAM:
        why = f"is a socket of the type {opened.type}; wanted: a stream"
    elif not _listens(opened):
        why = "is a socket that does not listen"
    if why:
        # It belongs to the supervisor, so it stays open.
        opened.detach()
        raise Unusable(why)
    return opened


def _listens(opened: socket.socket) -> bool:
    """Whether the socket listens, or may do so.

    macOS does not know the option and so cannot tell; `listen` will then find out.
    """
    try:
        return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return True


def chosen(sockets: list[socket.socket], port: int) -> socket.socket:
    """The first TCP socket on `port`, else the first of all."""
    return next((s for s in sockets if port_of(s) == port), sockets[0])


def port_of(opened: socket.socket) -> int | None:
    """Its TCP port, or None for a Unix socket."""
    return None if opened.family == socket.AF_UNIX else int(opened.getsockname()[1])


def address_text(opened: socket.socket) -> str:
    """Its address in words."""
    address = opened.getsockname()
    if opened.family == socket.AF_UNIX:
        return f"unix:{os.fsdecode(address)}"
    host = f"[{address[0]}]" if opened.family == socket.AF_INET6 else address[0]
    return f"{host}:{address[1]}"


def listen(opened: socket.socket, backlog: int) -> None:
    """Let the socket queue so many connections, as far as the system allows.

    Raises Unusable if it cannot listen at all.
    """
    # launchd and some others pass a socket that does not block. On macOS the connections that it
    # accepts would not block either.
    opened.setblocking(True)
    try:
        opened.listen(backlog)
    except OSError as error:
        raise Unusable(f"{address_text(opened)} cannot be listened on: {error.strerror}") from None
