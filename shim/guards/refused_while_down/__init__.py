"""While a server restarts and its model loads, the port is closed: clients cannot connect.

Here, if a supervisor passes in a listening socket, by systemd's LISTEN_FDS or from launchd
(MLX_SHIM_LAUNCHD_SOCKET), the stock server uses it and does not bind a socket of its own. The
supervisor keeps the socket open, so connections made during the restart wait in the kernel's queue
until the next process answers them. A process that is about to end takes no more connections from
that queue. Without a passed socket the guard changes nothing.
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

# So many connections may wait for the next process, if the system allows it.
BACKLOG = 1024
# Seconds after which a client may come back when this process ends: it can connect at once, before
# the model is loaded.
RETRY_AFTER = 1

# The passed descriptors; None until they were asked for. They stay open, since a program may serve
# more than once.
_passed: list[int] | None = None


def probe(server: Any) -> None:
    """Incompatible if stock does not serve by the server class that it is given.

    Without a passed socket the probe cannot try whether a later release takes one itself. Such a
    release would read the variables first and remove them from the environment, and this guard
    would do nothing.
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
        # The server class of a program handles its sockets itself.
        return wrapped(*args, **kwargs)
    try:
        passed = _take(call.arguments["port"])
    except Unusable as reason:
        fatal.die(fatal.EX_CONFIG, f"the socket to serve on cannot be used: {reason}")
    if passed is None:
        return wrapped(*args, **kwargs)
    errors.after_end = RETRY_AFTER
    call.arguments["server_class"] = serving_on(stock, passed)
    if passed.family != socket.AF_UNIX:
        # Stock looks this address up, and logs it.
        call.arguments["host"], call.arguments["port"] = passed.getsockname()[:2]
    return wrapped(*call.args, **call.kwargs)


def _take(port: int) -> socket.socket | None:
    """The socket to serve on, ready for use, or None if none was passed."""
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
    others = [passed_sockets.address_text(s) for s in usable if s is not chosen]
    reasons += [f"{address} is not served" for address in others]
    serving = f"serving on the passed socket {passed_sockets.address_text(chosen)}{where}"
    report.line("; ".join([serving, *reasons]))
    # A server may close its socket, so it gets a duplicate.
    own = chosen.dup()
    for s in usable:
        s.detach()
    return own


def serving_on(stock: Any, passed: socket.socket) -> Any:
    """A subclass of the stock server class that serves on `passed`; stock's class is unchanged."""

    class Server(stock):  # type: ignore[misc]
        # What the passed socket listens with; `short_backlog` leaves this class alone.
        request_queue_size = BACKLOG
        socket: Any
        server_name: str
        server_port: int

        def server_bind(self) -> None:
            self.socket.close()
            self.socket = passed
            self.address_family = passed.family
            self.server_address = address = passed.getsockname()
            unix = passed.family == socket.AF_UNIX
            # http.server would look the name up, which may take long.
            self.server_name, self.server_port = ("localhost", 0) if unix else address[:2]

        def server_activate(self) -> None:
            """Do nothing: the socket listens already."""

        def get_request(self) -> tuple[socket.socket, Any]:
            if fatal.begun():
                # The next process answers the connections that are still in the queue.
                threading.Event().wait()
            connection, address = super().get_request()
            engine.accepted.add(connection)
            # The client of a Unix socket has no address, but http.server logs its first part.
            return connection, ("unix", 0) if passed.family == socket.AF_UNIX else address

        def close_request(self, request: Any) -> None:
            engine.accepted.discard(request)
            super().close_request(request)

    return Server
