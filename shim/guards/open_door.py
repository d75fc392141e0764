"""Whoever reaches the port is served: stock knows no key, and --host shows the port to a whole network.

With MLX_SHIM_API_KEY_FILE a request must bring the key in that file as a Bearer token; else it is answered 401 before
its body is read. Asked at the one place that every request passes, whatever its method and path; open are only
the health paths, for supervisors, and OPTIONS, for browsers, which send no key with it. A file that cannot be used
is never taken for none: no server starts (78). Nothing of the key, or of what a client brought instead, is ever said.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from ..core import answers, errors, patch, settings
from ..core.verdicts import Refused, require
from ..engine.state import engine

UPSTREAM = "mlx-lm 1687, 1695"
MODULE = "mlx_lm.server"
SETTINGS = ("api_key_file",)
REQUIRED = True

_PUBLIC = ("/health", "/health/live", "/health/ready")
LINGER = 1.0  # seconds: not for long, as anybody can have it
_SHORTEST = 16  # characters
_LARGEST = 4096  # bytes of the file
_OTHERS = 0o006  # may read or write


def probe(server: Any) -> None:
    require(server, "APIHandler.parse_request", "APIHandler._set_cors_headers")


def apply(server: Any) -> None:
    key = (
        secrets.token_bytes()
    )  # nobody has it: should a server start in spite of what is raised below, it is closed
    try:
        key = read_key(settings.current.api_key_file)
    finally:
        patch.wrap(server, "APIHandler.parse_request", _Door(key))
    patch.wrap(server, "APIHandler._set_cors_headers", _set_cors_headers)


def read_key(name: str) -> bytes:
    """The key in a file. Raises Refused where it cannot be trusted with one; not even the name is said: it may be the key."""
    try:
        opened = os.open(
            Path(name).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # a pipe would be waited for
        try:
            return _read(opened)
        finally:
            os.close(opened)
    except (OSError, RuntimeError) as error:  # RuntimeError: a home that is nobody's
        why = getattr(error, "strerror", None) or "no such home"
        raise Refused(f"the key file cannot be read: {why}") from None


def _read(opened: int) -> bytes:
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode):
        raise Refused("the key file is no regular file")
    if found.st_mode & _OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise Refused(f"anyone can read or write the key file (its mode is {mode:04o}): chmod 600")
    content = os.read(opened, _LARGEST + 1)
    key = content.strip()
    if not key:
        raise Refused("the key file is empty")
    if len(content) > _LARGEST:
        raise Refused(f"the key file has more than {_LARGEST} bytes")
    if not all(0x20 < byte < 0x7F for byte in key):  # noqa: PLR2004
        raise Refused("the key is not one word of printable ASCII")
    if len(key) < _SHORTEST:
        raise Refused(f"the key has fewer than {_SHORTEST} characters")
    return key


class _Door:
    """Around `parse_request`, where a request's first line and headers are known and nothing has been done for it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not wrapped(*args, **kwargs):
            return False  # it made no sense, and has been answered so
        if engine.own is not None or _is_public(instance) or self._has_key(instance):
            return True
        answers.refuse(instance, errors.no_key(), LINGER)
        return False

    def _has_key(self, handler: Any) -> bool:
        given = handler.headers.get_all("Authorization") or []
        scheme, _, token = str(given[0] if len(given) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(token.strip().encode(errors="replace"), self._key)
        return same and scheme.lower() == "bearer"


def _is_public(handler: Any) -> bool:
    if handler.command == "OPTIONS":
        return True
    return handler.command == "GET" and handler.path.split("?", 1)[0] in _PUBLIC


def _set_cors_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Stock's `*` does not include Authorization: a browser would not send the key."""
    wrapped(*args, **kwargs)
    instance.send_header("Access-Control-Allow-Headers", "Authorization")
