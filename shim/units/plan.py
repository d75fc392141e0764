"""What a unit says, whatever its format."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import Refused

OPEN_FILES = 4096  # model files, and a socket a client: launchd's 256 is soon too few


@dataclass(frozen=True)
class Unit:
    """A server as a unit runs it. Paths are absolute, `environ` holds no secret."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stop_limit: int  # seconds
    host: str = "127.0.0.1"
    port: int = 8080
    workdir: str = "/"
    log: str = ""
    user: str = ""  # whom a unit of the system runs as; empty for a unit of the user's own
    socket: bool = False
    notify: bool = False
    watchdog: int = 0  # seconds; with `notify`
    note: str = ""  # of what its environment has that nobody asked for


@dataclass(frozen=True)
class Made:
    """The files of a unit by name, and what is to be known about them."""

    files: Mapping[str, str]
    advice: list[str] = field(default_factory=list)


def address(unit: Unit) -> str:
    """The host of a socket that the supervisor opens, as a number. Raises Refused for a name: not all of them take one."""
    if unit.host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(unit.host or "0.0.0.0"))  # noqa: S104 - an empty --host is that to the server
    except ValueError:
        raise Refused(f"--socket needs a --host that is an IP address, not {unit.host!r}") from None


def host_and_port(unit: Unit) -> str:
    """address:port, an IPv6 address in brackets."""
    host = address(unit)
    return f"[{host}]:{unit.port}" if ":" in host else f"{host}:{unit.port}"


def check_path(what: str, path: str) -> None:
    """Raise Refused for a path that cannot stand in every format."""
    if (
        not os.path.isabs(path)  # noqa: PTH117
        or not path.isprintable()
        or path != path.strip()
        or path.endswith("\\")
    ):
        raise Refused(f"{what} {path!r} is not taken: accepted: an absolute path without newlines")
