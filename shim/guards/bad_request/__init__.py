"""A request with a wrong value is accepted and fails late, sometimes for all clients.

Such a request fails silently, with 404, or takes the server down. Stock checks some fields. A
value that it lets through can kill the generation thread (an empty prompt, a stop word that is
not a string), the process (a logit_bias id out of range) or the connection (a body that is not
UTF-8, a negative seed). Here the whole body is checked before stock acts on it. A value that
stock cannot work on gets 400 with the name of the field.
"""

from __future__ import annotations

import sys
from typing import Any

from ...core import answers, patch
from ...core.errors import ShimError
from ...core.verdicts import require
from . import body, schema

UPSTREAM = "mlx-lm 1505, 1693; docs/bad-requests.md has what was seen"
MODULE = "mlx_lm.server"

BAD_REQUEST = 400
# Bytes read at a time. A client that announces much and sends nothing must not get a large buffer.
READ_SIZE = 1 << 16


def probe(server: Any) -> None:
    require(
        server,
        "APIHandler.do_POST",
        "APIHandler._set_completion_headers(status_code)",
        "APIHandler._set_cors_headers()",
    )


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler.do_POST", _do_post)
    patch.wrap(server, "APIHandler._set_completion_headers", _set_completion_headers)


class _Body:
    """A handler's `rfile` whose `read` returns only a body that has passed the checks."""

    def __init__(self, handler: Any) -> None:
        self.asked_for = False
        self._raw = handler.rfile
        self._chat = "/chat/" in handler.path

    def read(self, size: int) -> bytes:
        self.asked_for = True
        raw = bytearray()
        while len(raw) < size:
            piece = self._raw.read(min(READ_SIZE, size - len(raw)))
            if not piece:
                raise ShimError(
                    400,
                    "incomplete_body",
                    f"the body ended after {len(raw)} of the {size} bytes of Content-Length",
                )
            raw += piece
        schema.check(body.parse(bytes(raw)), self._chat)
        return bytes(raw)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    stock = instance.rfile
    instance.rfile = checked = _Body(instance)
    try:
        wrapped(*args, **kwargs)
        # Stock has answered that there is no such path.
        if not checked.asked_for:
            answers.read_out(instance.connection)
    except ShimError as error:
        answers.refuse(instance, error)
    finally:
        instance.rfile = stock


def _set_completion_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Answer in the shim's shape where stock itself refuses: with 400, from an except block."""
    status = patch.given(wrapped, args, kwargs, "status_code", 0)
    cause = sys.exc_info()[1]
    if status == BAD_REQUEST and isinstance(cause, Exception) and isinstance(instance.rfile, _Body):
        if isinstance(cause, ShimError):
            raise cause
        raise ShimError(
            BAD_REQUEST, "invalid_request", str(cause) or type(cause).__name__
        ) from cause
    return wrapped(*args, **kwargs)
