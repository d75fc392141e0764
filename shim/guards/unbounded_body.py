"""A body of any size is read into memory, and a negative Content-Length hangs its handler.

A body of 200 MB takes 459 MB of memory. Here a body above MLX_SHIM_MAX_BODY gets 413 before any of
it is read, and a Content-Length that is not a whole number gets 400.
"""

from __future__ import annotations

from typing import Any

from ..core import answers, patch, settings
from ..core.errors import ShimError
from ..core.verdicts import require

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(server, "APIHandler.do_POST")


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler.do_POST", _do_post)


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        _check(instance.headers)
    except ShimError as error:
        answers.refuse(instance, error)
        return None
    return wrapped(*args, **kwargs)


def _check(headers: Any) -> None:
    lengths = {length.strip() for length in headers.get_all("Content-Length", [])}
    if headers.get("Transfer-Encoding") is not None:
        raise ShimError(
            411,
            "length_required",
            "Transfer-Encoding is not supported; accepted: a body with Content-Length",
        )
    if not lengths:
        raise ShimError(411, "length_required", "the request has no Content-Length")
    length = lengths.pop()
    if lengths or not (length.isascii() and length.isdecimal()):
        raise ShimError(
            400,
            "invalid_content_length",
            f"Content-Length is {length[:40]!r}; accepted: one whole number",
        )
    limit = settings.current.max_body
    if limit and (len(length) > 18 or int(length) > limit):  # noqa: PLR2004
        raise ShimError(
            413,
            "body_too_large",
            f"the body is {length[:40]} bytes; accepted: {limit} (MLX_SHIM_MAX_BODY)",
        )
