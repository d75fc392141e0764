"""Fetch an image that a request names, as far as a stranger may have this machine do so.

The host is resolved here, each address it has is judged, and one of just these is connected to: how an address is
written, and what its name says a moment later, changes nothing. The time and the bytes are those of a whole request.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from .public_address import is_public

MAX_IMAGES = 32  # a request
MAX_BYTES = 32 * 2**20  # a request: all that is received for it, headers included
MAX_SECONDS = 30.0  # a request, from the first name that is resolved
MAX_REDIRECTS = 3  # an image
MAX_URL = 8192  # characters
CONNECT_SECONDS = 10.0  # an address, so that the next one gets its turn
_PIECE = 65536
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[a-z0-9_][a-z0-9._-]*|[0-9a-f:.]*:[0-9a-f:.]*")


class CannotFetch(Exception):
    """Why an image is not fetched, in words that follow its URL. Never tells what is on a network of ours."""


class Allowance:
    """What the images of one request may still cost."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS
        self.bytes = MAX_BYTES

    def seconds(self) -> float:
        """The time that is left, more than 0. Raises CannotFetch where there is none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise CannotFetch(
                f"took too long: the images of a request are fetched within {MAX_SECONDS:g} seconds"
            )
        return left

    def spend(self, count: int) -> None:
        """Note so many bytes. Raises CannotFetch where there were fewer."""
        if count > self.bytes:
            raise CannotFetch(
                f"is too large: the images of a request are at most {MAX_BYTES // 2**20} MiB"
            )
        self.bytes -= count


@dataclass(frozen=True)
class Target:
    """A URL that has been looked at: the host in lower case and in ASCII, and what is asked of it."""

    url: str
    scheme: str
    host: str
    port: int
    path: str


def parse(url: str) -> Target:
    """Raises CannotFetch where it is no http(s) URL that can be asked for."""
    if len(url) > MAX_URL:
        raise CannotFetch(f"has {len(url)} characters; at most {MAX_URL} are accepted")
    if any(c <= " " or c == "\x7f" for c in url):
        raise CannotFetch("has a space or a control character in it")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = _PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError as error:  # UnicodeError is one
        raise CannotFetch("is not a URL: its host or its port cannot be read") from error
    if parts.scheme not in _PORTS:
        raise CannotFetch("is neither http nor https")
    if "@" in parts.netloc:
        raise CannotFetch("has a user name or a password in it, which is not accepted")
    if not port or not _HOST.fullmatch(host):
        raise CannotFetch("names no host that can be asked, or a port that is none")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii():
        raise CannotFetch("has characters beyond ASCII in its path; they are written with %")
    return Target(url, parts.scheme, host, port, path)


def fetch(target: Target, allowance: Allowance, *, public: bool) -> tuple[str, bytes]:
    """The image's MIME type, as its server gives it, and its bytes; with `public`, from public addresses alone.

    Raises CannotFetch.
    """
    try:
        for _ in range(1 + MAX_REDIRECTS):
            with _connect(target, allowance, public=public) as sock:
                response = _ask(target, _Wire(sock, allowance))
                if response.status in _REDIRECTS:
                    target = _follow(target, response.headers.get("Location"))
                    continue
                if response.status != http.client.OK:
                    raise CannotFetch(
                        f"was answered {response.status} by its server; 200 is accepted"
                    )
                return response.headers.get_content_type(), _body(response, allowance)
    except (OSError, http.client.HTTPException) as error:
        allowance.seconds()  # else it is the time
        raise CannotFetch(f"could not be fetched ({type(error).__name__})") from error
    raise CannotFetch(f"is redirected more than {MAX_REDIRECTS} times")


def _follow(target: Target, location: str | None) -> Target:
    """Where a redirect leads: to the same host and port, or from http to https there."""
    try:
        there = parse(urljoin(target.url, location or ""))
    except (CannotFetch, ValueError) as error:
        raise CannotFetch("is redirected to what is not an http(s) URL") from error
    same = (there.scheme, there.port) == (target.scheme, target.port)
    if there.host != target.host or not (
        same or (target.scheme, there.scheme) == ("http", "https")
    ):
        raise CannotFetch(
            "is redirected elsewhere, which is not followed; name the URL where the image is"
        )
    return there


def _resolve(target: Target, allowance: Allowance) -> list[Any]:
    """What getaddrinfo answers, or nothing. In a thread of its own, because nothing else ends it in time."""
    answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):
            answers.put([])

    threading.Thread(target=ask, name="mlx-lm-shim resolver", daemon=True).start()
    try:
        return answers.get(timeout=allowance.seconds())
    except queue.Empty:
        return []


def _connect(target: Target, allowance: Allowance, *, public: bool) -> socket.socket:
    """A connection to one of the host's addresses; with `public`, none of which is anything but public."""
    found = _resolve(target, allowance)
    allowance.seconds()
    if public and not (
        found and all(_may_be_asked(family, address) for family, *_, address in found)
    ):
        # The same words whether there is no such name or where it leads: they would tell a stranger what is inside.
        raise CannotFetch(
            "is not at a public address of the internet, or at none, and no other is asked here"
        )
    failed: OSError = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(min(CONNECT_SECONDS, allowance.seconds()))
            sock.connect(address)
            return sock if target.scheme == "http" else _secured(sock, target, allowance)
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
    raise failed


def _may_be_asked(family: int, address: Any) -> bool:
    scope = address[3] if family == socket.AF_INET6 else 0
    return not scope and is_public(address[0]) and not _is_own(family, address)


def _is_own(family: int, address: Any) -> bool:
    """Whether it is an address of this machine, on which its services may listen: public ones are usual with IPv6.

    A datagram socket that is connected sends nothing; it tells from which of our addresses it would.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False  # there is no way to it
        return ipaddress.ip_address(probe.getsockname()[0]) == ipaddress.ip_address(address[0])


def _secured(sock: socket.socket, target: Target, allowance: Allowance) -> socket.socket:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    sock.settimeout(allowance.seconds())  # for the handshake as a whole
    return context.wrap_socket(sock, server_hostname=target.host.rstrip("."))


class _Wire(io.RawIOBase):
    """A connection, read within the allowance: every wait is for the time that is left, every byte counts."""

    def __init__(self, sock: socket.socket, allowance: Allowance) -> None:
        self._sock = sock
        self._allowance = allowance

    def send(self, data: bytes) -> None:
        self._sock.settimeout(self._allowance.seconds())
        self._sock.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._allowance.seconds())
        count = self._sock.recv_into(buffer)
        self._allowance.spend(count)
        return count

    def makefile(self, mode: str) -> io.BufferedReader:
        """What http.client asks of a socket."""
        return io.BufferedReader(self)


def _ask(target: Target, wire: Any) -> http.client.HTTPResponse:
    host = f"[{target.host}]" if ":" in target.host else target.host
    if target.port != _PORTS[target.scheme]:
        host += f":{target.port}"
    lines = (
        f"GET {target.path} HTTP/1.1", f"Host: {host}", "User-Agent: mlx-lm-shim", "Accept: image/*, */*;q=0.1",
        "Accept-Encoding: identity", "Connection: close", "", "",
    )  # fmt: skip
    wire.send("\r\n".join(lines).encode("ascii"))
    response = http.client.HTTPResponse(wire, method="GET")
    response.begin()
    return response


def _body(response: http.client.HTTPResponse, allowance: Allowance) -> bytes:
    if response.length is not None and response.length > allowance.bytes:
        allowance.spend(response.length)
    pieces = []
    while piece := response.read(
        _PIECE
    ):  # in pieces: asked for a whole chunk, http.client believes the size it names
        pieces.append(piece)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)
