"""SIGTERM cuts every answer; Ctrl-C aborts the process, or waits without end.

Stock does not handle SIGTERM. Its handling of SIGINT tears the interpreter down while streams are
still open, and waits for a request that is served alone. Here the first SIGTERM or SIGINT lets
the requests in flight finish, for at most MLX_SHIM_DRAIN; new requests get 503. Requests that do
not finish in time get an error, the generation thread ends as stock ends it, and the exit status
is 0. A second signal ends the process at once.

The guard leaves a signal alone that the program itself handles or ignores. It acts only where the
server runs in the main thread.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from ..core import patch, report, verdicts
from ..core.verdicts import Incompatible
from ..engine import drain, facts
from ..engine.state import engine

UPSTREAM = "no issue known; mlx_lm/server.py handles KeyboardInterrupt alone"
MODULE = "mlx_lm.server"

_DEFAULTS: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}

LIVES_BY = {
    "stop flag": "the generation thread ends with the process, inside its loop",
    ("handlers", "answers"): facts.NEEDED,
    ("turns", "boot", "deliveries"): "requests in flight are not waited for",
}
# While one of these runs, the guard handles the signals. Some programs call only the second.
RUNS = ("run", "_run_http_server")


def probe(server: Any) -> str:
    if not any(verdicts.has(server, path) for path in RUNS):
        raise Incompatible(f"{server.__name__} has neither {' nor '.join(RUNS)}")
    if verdicts.has(server, "ResponseGenerator._share_request"):
        return ""
    return "servers that share a model stop one after another"


def apply(server: Any) -> None:
    drain.install(server)
    for path in RUNS:
        patch.try_wrap(server, path, _handling)


def _handling(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Handle the signals only while stock runs the server."""
    asked = _Asked(os.getpid())
    ours: list[int] = []
    with report.contained("signals are left as they are", tell=report.line):
        ours = _install(asked)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if engine.draining:
            # Rank 0 has stopped this rank. The drain ends the process while this thread waits, so
            # that the interpreter is not torn down.
            threading.Event().wait(drain.JOIN_LIMIT)
        for number in ours:
            if signal.getsignal(number) is asked:
                signal.signal(number, _DEFAULTS[number])


def _install(asked: _Asked) -> list[int]:
    if threading.current_thread() is not threading.main_thread():
        # Python lets only the main thread set handlers.
        return []
    # Before the handlers are set: a handled signal needs the thread that acts on it.
    drain.start()
    ours = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    for number in ours:
        signal.signal(number, asked)
    return ours


class _Asked:
    """The signal handler. It may interrupt the main thread anywhere, so it only posts an order."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __call__(self, number: int, frame: Any) -> None:
        # In a forked child, which has no thread of the shim.
        if os.getpid() != self._pid:
            signal.signal(number, _DEFAULTS[number])
            signal.raise_signal(number)
            return
        drain.ask(drain.Order(signal.Signals(number).name))
