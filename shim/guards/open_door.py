"""Every client that reaches the port is served: stock does not ask for an API key.

`--host` can open the port to a whole network. With MLX_SHIM_API_KEY_FILE a request must bring the
key in that file as a Bearer token. Otherwise it gets 401 before its body is read. The key is
checked at the one place that every request passes, whatever its method and path. Two kinds of
request need no key: the health paths, for supervisors, and OPTIONS, for browsers, which send no key
with it. If the file cannot be used, no server starts (78). The shim never prints any part of the
key, or of what a client brought in its place.
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

_PUBLIC_PATHS = ("/health", "/health/live", "/health/ready")
# For so long, at most, the body of a refused request is read and thrown away. It is short, since
# every client can cause that.
LINGER_SECONDS = 1.0
_MIN_KEY_CHARACTERS = 16
_MAX_FILE_BYTES = 4096
# The bits of a file's mode that let other users read or write it.
_MODE_OF_OTHERS = 0o006


def probe(server: Any) -> None:
    require(server, "APIHandler.parse_request", "APIHandler._set_cors_headers")


def apply(server: Any) -> None:
    # No client has this key: if a server starts in spite of what is raised below, it is closed.
    key = secrets.token_bytes()
    try:
        key = read_key(settings.current.api_key_file)
    finally:
        patch.wrap(server, "APIHandler.parse_request", _Door(key))
    patch.wrap(server, "APIHandler._set_cors_headers", _set_cors_headers)


def read_key(name: str) -> bytes:
    """The key in a file. Raises Refused if the file cannot be used.

    The message does not even give the name of the file, which may be the key itself.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait.
        opened = os.open(Path(name).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read(opened)
        finally:
            os.close(opened)
    except (OSError, RuntimeError) as error:
        # expanduser raises RuntimeError for the home of an unknown user.
        why = getattr(error, "strerror", None) or "there is no such home folder"
        raise Refused(f"the key file cannot be read: {why}") from None


def _read(opened: int) -> bytes:
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode):
        raise Refused("the key file is not a regular file")
    if found.st_mode & _MODE_OF_OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise Refused(f"anyone can read or write the key file (its mode is {mode:04o}): chmod 600")
    content = os.read(opened, _MAX_FILE_BYTES + 1)
    key = content.strip()
    if not key:
        raise Refused("the key file is empty")
    if len(content) > _MAX_FILE_BYTES:
        raise Refused(f"the key file has more than {_MAX_FILE_BYTES} bytes")
    if not all(0x20 < byte < 0x7F for byte in key):  # noqa: PLR2004
        raise Refused("the key is not one word of printable ASCII")
    if len(key) < _MIN_KEY_CHARACTERS:
        raise Refused(f"the key has fewer than {_MIN_KEY_CHARACTERS} characters")
    return key


class _Door:
    """The wrapper of `parse_request`.

    After it the first line and the headers of a request are known, and nothing else has been done.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if not wrapped(*args, **kwargs):
            # Stock could not parse the request, and has answered it.
            return False
        if engine.own is not None or _is_public(instance) or self._has_key(instance):
            return True
        answers.refuse(instance, errors.no_key(), LINGER_SECONDS)
        return False

    def _has_key(self, handler: Any) -> bool:
        given = handler.headers.get_all("Authorization") or []
        scheme, _, token = str(given[0] if len(given) == 1 else "").strip().partition(" ")
        same = hmac.compare_digest(token.strip().encode(errors="replace"), self._key)
        return same and scheme.lower() == "bearer"


def _is_public(handler: Any) -> bool:
    if handler.command == "OPTIONS":
        return True
    return handler.command == "GET" and handler.path.split("?", 1)[0] in _PUBLIC_PATHS


def _set_cors_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Allow the header Authorization, so that browsers send the key: stock's `*` does not do so."""
    wrapped(*args, **kwargs)
    instance.send_header("Access-Control-Allow-Headers", "Authorization")
