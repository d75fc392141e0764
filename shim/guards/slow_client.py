"""A client that trickles its request, or stops sending it, holds a thread of the server for ever.

Here headers must be in within MLX_SHIM_READ_TIMEOUT, and a body must keep up 500 bytes a second beyond it: else the
connection is closed, where the headers were complete with 408. A client that reads a stream slowly is left alone.
"""

from __future__ import annotations

import io
from typing import Any

from .. import http, incoming, patch, settings
from ..errors import ShimError
from . import require

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2: 300 idle connections hold 300 threads"
MODULE = "mlx_lm.server"
SETTINGS = ("read_timeout",)


def probe(server: Any) -> None:
    require(server, "APIHandler.setup", "APIHandler.do_POST")


def apply(server: Any) -> None:
    patch.wrap(server, "APIHandler.setup", _setup)
    patch.wrap(server, "APIHandler.do_POST", _do_post)


def _setup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    instance._shim_incoming = incoming.Incoming(instance.connection, settings.current.read_timeout)
    instance.rfile.close()
    instance.rfile = io.BufferedReader(instance._shim_incoming, 1 << 16)
    return result


def _do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    instance._shim_incoming.start_body()
    try:
        return wrapped(*args, **kwargs)
    except incoming.TooSlow:
        limit = f"{settings.current.read_timeout:g} s"
        http.refuse(instance, ShimError(408, "request_timeout", f"the body was not sent within {limit}"))
        return None
