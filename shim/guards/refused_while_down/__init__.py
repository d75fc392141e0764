"""While a server restarts and its model loads, nobody listens on the port: who connects is refused.

Here, where a supervisor passes the listening socket in, by systemd's LISTEN_FDS or from launchd
(MLX_SHIM_LAUNCHD_SOCKET), the stock server serves on that instead of binding one of its own. The supervisor holds it open all the time, so that
connections made meanwhile wait in the kernel's queue, and the next process answers them. Once the end of this one has
begun it takes no more out of that queue. Without a passed socket nothing is different.
"""

from __future__ import annotations

import inspect
import socket
import threading
from typing import Any

from ...core import errors, patch, report, settings
from ...core.verdicts import Incompatible, require
from ...engine import fatal
from ...engine.state import engine
from ...probing import dry_run
from . import passed_sockets
from .passed_sockets import Unusable

UPSTREAM = "no issue known; _run_http_server in mlx_lm/server.py always binds a socket of its own"
MODULE = "mlx_lm.server"

BACKLOG = 1024  # connections that wait for the next process, where the system allows so many
RETRY_AFTER = 1  # seconds after a death: one need not wait for the model before one connects

_passed: list[int] | None = (
    None  # descriptors; they stay open, for a program that serves more than once
)


def probe(server: Any) -> None:
    """Incompatible where stock does not serve by the server class that it is given.

    Whether some future stock takes a passed socket cannot be tried without one. It would find the variables first and
    take them out of the environment, and this guard then has nothing to do.
    """
    require(server, "_run_http_server", "APIHandler")
    served = []

    class Server:
        def __init__(self, address: Any, handler: Any) -> None:
            self.given = callable(handler)

        def serve_forever(self) -> None:
            served.append(self.given)

    stock = server._run_http_server
    if "server_class" in inspect.signature(stock).parameters:
        quiet = dry_run.Anything()
        dry_run.of(stock, logging=quiet, warnings=quiet)("127.0.0.1", 0, quiet, server_class=Server)
    if served != [True]:
        raise Incompatible(
            f"{server.__name__}._run_http_server does not serve by a server class that it is given"
        )


def apply(server: Any) -> None:
    patch.wrap(server, "_run_http_server", _serve)


def _serve(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    signature = inspect.signature(wrapped)
    call = signature.bind(*args, **kwargs)
    stock = signature.parameters["server_class"].default
    if call.arguments.get("server_class", stock) is not stock:
        return wrapped(*args, **kwargs)  # a program's own server sees to its sockets itself
    try:
        passed = _take(call.arguments["port"])
    except Unusable as reason:
        fatal.die(fatal.EX_CONFIG, f"the socket to serve on cannot be used: {reason}")
    if passed is None:
        return wrapped(*args, **kwargs)
    errors.after_end = RETRY_AFTER
    call.arguments["server_class"] = serving_on(stock, passed)
    if passed.family != socket.AF_UNIX:  # what stock looks up, and logs
        call.arguments["host"], call.arguments["port"] = passed.getsockname()[:2]
    return wrapped(*call.args, **call.kwargs)


def _take(port: int) -> socket.socket | None:
    """The socket to serve on, ready for that, or None where none was passed."""
    global _passed
    if _passed is None:
        name = settings.current.launchd_socket
        _passed = [
            *(passed_sockets.from_launchd(name) if name else []),
            *passed_sockets.from_systemd(),
        ]
    if not _passed:
        return None
    usable, reasons = passed_sockets.opened(_passed)
    if not usable:
        raise Unusable("; ".join(reasons))
    chosen = passed_sockets.chosen(usable, port)
    passed_sockets.listen(chosen, BACKLOG)
    where = "" if passed_sockets.port_of(chosen) == port else f", not on --port {port}"
    reasons += [
        f"{passed_sockets.address_text(other)} is not served"
        for other in usable
        if other is not chosen
    ]
    report.line(
        "; ".join(
            [f"serving on the passed socket {passed_sockets.address_text(chosen)}{where}", *reasons]
        )
    )
    own = chosen.dup()  # as a server may close its own
    for s in usable:
        s.detach()
    return own


def serving_on(stock: Any, passed: socket.socket) -> Any:
    """A subclass of the stock server class that serves on `passed`. The standard library's own class stays as it is."""

    class Server(stock):  # type: ignore[misc]
        socket: Any
        server_name: str
        server_port: int

        def server_bind(self) -> None:
            self.socket.close()
            self.socket = passed
            self.address_family = passed.family
            self.server_address = address = passed.getsockname()
            unix = passed.family == socket.AF_UNIX
            self.server_name, self.server_port = (
                ("localhost", 0) if unix else address[:2]
            )  # by no look-up of names

        def server_activate(self) -> None:
            """It listens."""

        def get_request(self) -> tuple[socket.socket, Any]:
            if fatal.begun():
                threading.Event().wait()  # who has not been let in is the next process's to answer
            connection, address = super().get_request()
            engine.accepted.add(connection)
            # The client of a Unix socket has no address, and http.server logs the first part of one.
            return connection, ("unix", 0) if passed.family == socket.AF_UNIX else address

        def close_request(self, request: Any) -> None:
            engine.accepted.discard(request)
            super().close_request(request)

    return Server
