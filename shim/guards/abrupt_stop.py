"""SIGTERM, or a terminal that closes, cuts every answer; Ctrl-C aborts, or waits without end.

Stock handles neither SIGTERM nor SIGHUP. Its handling of SIGINT tears the interpreter down while
streams are still open, and waits for a request that is served alone. Here the first of these
signals lets the requests in flight finish, for at most MLX_SHIM_DRAIN; new requests get 503.
Requests that do not finish in time get an error, the generation thread ends as stock ends it, and
the exit status is 0. A second SIGTERM or SIGINT ends the process at once. A second SIGHUP does not,
because a terminal that closes may send several.

The guard leaves a signal alone that the program itself handles or ignores (nohup). It acts only
where the server runs in the main thread.
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
    signal.SIGHUP: signal.SIG_DFL,
}

LIVES_BY = {
    "stop flag": "the generation thread ends with the process, inside its loop",
    ("handlers", "answers"): facts.NEEDED,
    ("turns", "boot", "deliveries"): "requests in flight are not waited for",
}
# While one of these runs, the guard handles the signals. Some programs call only the second.
RUNS = ("run", "_run_http_server")
# The file descriptors of stdout and stderr.
_OUTPUTS = (1, 2)
# Those of them that were a terminal when the server began to run.
_terminals: set[int] = set()


def probe(server: Any) -> str:
    if not any(verdicts.has(server, path) for path in RUNS):
        raise Incompatible(f"{server.__name__} has neither {' nor '.join(RUNS)}")
    if verdicts.has(server, "ResponseGenerator._share_request"):
        return ""
    return "servers that share a model stop one after another"


def apply(server: Any) -> None:
    drain.install(server)
    drain.on_begin.append(_let_go_of_the_terminal)
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
    _terminals.update(fd for fd in _OUTPUTS if os.isatty(fd))
    ours = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    for number in ours:
        signal.signal(number, asked)
    return ours


def _let_go_of_the_terminal() -> None:
    """Send the output of a closed terminal to /dev/null. Called when a drain begins.

    Stock fails a request if it cannot write its log line.
    """
    for fd in _terminals:
        if not os.isatty(fd):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


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
        name = signal.Signals(number).name
        # The shell passes SIGHUP on to its jobs; the system sends another when the shell ends.
        drain.ask(drain.Order(name, hurries=number != signal.SIGHUP))
