"""What a unit of any format contains."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import Refused

# Model files, and a socket for each client. launchd's default of 256 is soon too few.
OPEN_FILES = 4096


@dataclass(frozen=True)
class Unit:
    """A server as a unit runs it. Its paths are absolute, and `environ` holds no secret."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stop_limit: int  # seconds
    host: str = "127.0.0.1"
    port: int = 8080
    workdir: str = "/"
    log: str = ""
    # The user that a system unit runs as; empty for the user's own unit.
    user: str = ""
    socket: bool = False
    notify: bool = False
    # Seconds; used with `notify`.
    watchdog: int = 0
    # About the variables that the shim added by itself.
    note: str = ""


@dataclass(frozen=True)
class Made:
    """The files of a unit by name, and advice about them."""

    files: Mapping[str, str]
    advice: list[str] = field(default_factory=list)


def address(unit: Unit) -> str:
    """The host of a socket that the supervisor opens, as a number.

    Raises Refused for a name: not every supervisor takes one.
    """
    if unit.host == "localhost":
        return "127.0.0.1"
    try:
        # The server takes an empty --host as 0.0.0.0.
        return str(ipaddress.ip_address(unit.host or "0.0.0.0"))  # noqa: S104
    except ValueError:
        raise Refused(f"--socket needs a --host that is an IP address, not {unit.host!r}") from None


def host_and_port(unit: Unit) -> str:
    """address:port, with an IPv6 address in brackets."""
    host = address(unit)
    return f"[{host}]:{unit.port}" if ":" in host else f"{host}:{unit.port}"


def check_path(what: str, path: str) -> None:
    """Raise Refused for a path that some format cannot hold."""
    if (
        not os.path.isabs(path)  # noqa: PTH117
        or not path.isprintable()
        or path != path.strip()
        or path.endswith("\\")
    ):
        raise Refused(f"{what} {path!r} is not taken: accepted: an absolute path without newlines")
