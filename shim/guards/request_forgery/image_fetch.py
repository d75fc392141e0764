"""Fetch an image that a request names, within what an unknown client may make this machine do.

The host is resolved here, each of its addresses is checked, and the shim connects to one of exactly
these. So it does not matter how an address is written, or what the name resolves to a moment later.
The limits of time and bytes are for all images of a request.
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

# For a request. The bytes are all that is received, headers included; the time begins when the
# first name is resolved.
MAX_IMAGES = 32
MAX_BYTES = 32 * 2**20
MAX_SECONDS = 30.0
# For an image.
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192
# For an address, so that the next one is tried in time.
CONNECT_SECONDS = 10.0
_PIECE_BYTES = 65536
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[a-z0-9_][a-z0-9._-]*|[0-9a-f:.]*:[0-9a-f:.]*")


class CannotFetch(Exception):
    """Why an image is not fetched, in words that follow its URL.

    The words never tell what is in the server's own network.
    """


class Allowance:
    """The time and the bytes that the images of one request may still take."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS
        self.bytes = MAX_BYTES

    def seconds(self) -> float:
        """The time that is left, more than 0. Raises CannotFetch if there is none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise CannotFetch(
                f"took too long: the images of a request are fetched within {MAX_SECONDS:g} seconds"
            )
        return left

    def spend(self, count: int) -> None:
        """Subtract so many bytes. Raises CannotFetch if fewer are left."""
        if count > self.bytes:
            raise CannotFetch(
                f"is too large: the images of a request are at most {MAX_BYTES // 2**20} MiB"
            )
        self.bytes -= count


@dataclass(frozen=True)
class Target:
    """The parts of a checked URL; the host is in lower case and in ASCII."""

    url: str
    scheme: str
    host: str
    port: int
    path: str


def parse(url: str) -> Target:
    """The parts of a URL. Raises CannotFetch if it is not an http(s) URL that can be fetched."""
    if len(url) > MAX_URL_CHARACTERS:
        raise CannotFetch(f"has {len(url)} characters; at most {MAX_URL_CHARACTERS} are accepted")
    if any(c <= " " or c == "\x7f" for c in url):
        raise CannotFetch("has a space or a control character in it")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = _PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError as error:
        # UnicodeError is a ValueError too.
        raise CannotFetch("is not a URL: its host or its port cannot be read") from error
    if parts.scheme not in _PORTS:
        raise CannotFetch("is neither http nor https")
    if "@" in parts.netloc:
        raise CannotFetch("has a user name or a password in it, which is not accepted")
    if not port or not _HOST.fullmatch(host):
        raise CannotFetch("has no host that can be asked, or its port is 0")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii():
        raise CannotFetch("has characters beyond ASCII in its path; they must be written with %")
    return Target(url, parts.scheme, host, port, path)


def fetch(target: Target, allowance: Allowance, *, public: bool) -> tuple[str, bytes]:
    """The image's MIME type, as its server gives it, and its bytes.

    With `public` it is fetched only from public addresses. Raises CannotFetch.
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
                        f"was answered {response.status} by its server; only 200 is accepted"
                    )
                return response.headers.get_content_type(), _body(response, allowance)
    except (OSError, http.client.HTTPException) as error:
        # If the time is over, this raises and says so.
        allowance.seconds()
        raise CannotFetch(f"could not be fetched ({type(error).__name__})") from error
    raise CannotFetch(f"is redirected more than {MAX_REDIRECTS} times")


def _follow(target: Target, location: str | None) -> Target:
    """The target of a redirect: the same host and port, or from http to https on the same host."""
    try:
        there = parse(urljoin(target.url, location or ""))
    except (CannotFetch, ValueError) as error:
        raise CannotFetch("is redirected to what is not an http(s) URL") from error
    same = (there.scheme, there.port) == (target.scheme, target.port)
    upgraded = (target.scheme, there.scheme) == ("http", "https")
    if there.host != target.host or not (same or upgraded):
        raise CannotFetch(
            "is redirected elsewhere, which is not followed; give the URL where the image is"
        )
    return there


def _resolve(target: Target, allowance: Allowance) -> list[Any]:
    """The answer of getaddrinfo, or nothing. It runs in a thread, since it has no time limit."""
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
    """A connection to one of the host's addresses; with `public`, all of them must be public."""
    found = _resolve(target, allowance)
    allowance.seconds()
    if public and not (found and all(_is_allowed(family, ip) for family, *_, ip in found)):
        # The same words for a name that does not exist: the client must not learn which names the
        # server's network has.
        raise CannotFetch(
            "is not at a public address of the internet, and no image is fetched from elsewhere"
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


def _is_allowed(family: int, address: Any) -> bool:
    scope = address[3] if family == socket.AF_INET6 else 0
    return not scope and is_public(address[0]) and not _is_own(family, address)


def _is_own(family: int, address: Any) -> bool:
    """Whether it is an address of this machine, where its services may listen.

    With IPv6 such addresses are usually public. A connected datagram socket sends nothing, but
    tells which address of this machine it would send from.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            # There is no route to it.
            return False
        return ipaddress.ip_address(probe.getsockname()[0]) == ipaddress.ip_address(address[0])


def _secured(sock: socket.socket, target: Target, allowance: Allowance) -> socket.socket:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    # For the whole handshake.
    sock.settimeout(allowance.seconds())
    return context.wrap_socket(sock, server_hostname=target.host.rstrip("."))


class _Wire(io.RawIOBase):
    """A connection, read within the allowance: every wait ends in time, every byte counts."""

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
        """The file from which http.client reads."""
        return io.BufferedReader(self)


def _ask(target: Target, wire: Any) -> http.client.HTTPResponse:
    host = f"[{target.host}]" if ":" in target.host else target.host
    if target.port != _PORTS[target.scheme]:
        host += f":{target.port}"
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {host}",
        "User-Agent: mlx-lm-shim",
        "Accept: image/*, */*;q=0.1",
        "Accept-Encoding: identity",
        "Connection: close",
        "",
        "",
    )
    wire.send("\r\n".join(lines).encode("ascii"))
    response = http.client.HTTPResponse(wire, method="GET")
    response.begin()
    return response


def _body(response: http.client.HTTPResponse, allowance: Allowance) -> bytes:
    if response.length is not None and response.length > allowance.bytes:
        allowance.spend(response.length)
    pieces = []
    # In pieces: for a whole chunk http.client would trust the size that the chunk gives.
    while piece := response.read(_PIECE_BYTES):
        pieces.append(piece)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)
