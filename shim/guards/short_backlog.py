"""Stock's HTTP server lets five connections wait until it accepts them; a burst overflows that.

macOS resets the connections that are too many. Linux drops them, and those clients wait a second
or more until their system asks again. Here 1024 connections may wait, if the system allows it. A
server class that asks for more than five by itself is left alone, and so is a passed socket, for
which `refused_while_down` asks.
"""

from __future__ import annotations

import inspect
import socketserver
from typing import Any

from ..core import patch
from ..core.verdicts import Incompatible, Retired, require
from ..probing import dry_run

UPSTREAM = "no issue known; seen on 0.31.3 and 0.32.2: request_queue_size of socketserver is 5"
MODULE = "mlx_lm.server"

# So many connections may wait, if the system allows it; as many as for a passed socket.
BACKLOG = 1024
# What socketserver asks for. A larger number was chosen by the class that has it.
TOO_SHORT = 5


def probe(server: Any) -> None:
    """Let a copy of stock's function make its server, with a socket that only notes the backlog."""
    require(server, "_run_http_server")
    stock = server._run_http_server
    parameters = inspect.signature(stock).parameters
    served = parameters["server_class"].default if "server_class" in parameters else None
    asked: list[int] = []
    if _is_class_of_socketserver(served):
        quiet = dry_run.Anything()
        listening = _noting(served, asked)
        dry_run.of(stock, logging=quiet, warnings=quiet)(
            "127.0.0.1", 0, quiet, server_class=listening
        )
    if not asked:
        raise Incompatible(
            f"{server.__name__}._run_http_server does not listen by a server class that it is given"
        )
    if asked[-1] > TOO_SHORT:
        raise Retired(f"stock listens with a backlog of {asked[-1]}")


def _noting(served: Any, asked: list[int]) -> Any:
    """A subclass of a server class that notes its backlog, and neither binds nor serves."""

    class Server(served):  # type: ignore[misc]
        socket: Any

        def __init__(self, address: Any, handler: Any) -> None:
            super().__init__(address, handler, bind_and_activate=False)
            self.socket.close()
            self.socket = dry_run.Anything(listen=asked.append)
            self.server_activate()

        def serve_forever(self) -> None:
            """Return at once."""

    return Server


def apply(server: Any) -> None:
    patch.wrap(server, "_run_http_server", _serve)


def _serve(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """In the main thread, inside refused_while_down."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    served = call.arguments["server_class"]
    if _is_class_of_socketserver(served) and served.request_queue_size <= TOO_SHORT:
        # A subclass: another server of the same program keeps what it has.
        call.arguments["server_class"] = type(
            served.__name__, (served,), {"request_queue_size": BACKLOG}
        )
    return wrapped(*call.args, **call.kwargs)


def _is_class_of_socketserver(served: Any) -> bool:
    return isinstance(served, type) and issubclass(served, socketserver.TCPServer)
