"""SIGTERM cuts every answer in the middle; Ctrl-C aborts the process, or waits without end for a request served alone.

Stock does not handle SIGTERM, and its handling of SIGINT ends in the interpreter's teardown beside live streams. Here
the first of either lets those in flight finish, for at most MLX_SHIM_DRAIN, while new requests are told 503; those that
could not are told, the generation thread ends as stock ends it, and the status is 0. A second one ends it at once. A
signal that the program handles, or ignores, is the program's. Only a server that is run in the main thread is reached.
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
    "stop flag": "the generation thread goes with the process, its loop not left",
    ("handlers", "answers"): facts.NEEDED,
    ("turns", "boot", "deliveries"): "requests in flight are not waited for",
}
# Where signals begin to be handled: the second for a program that calls it by itself.
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
    """Handle the signals while stock runs the server, no longer."""
    asked = _Asked(os.getpid())
    try:
        ours = _install(asked)
    except Exception as error:
        ours = []
        report.line(f"signals are left as they are: {error!r}")
    try:
        return wrapped(*args, **kwargs)
    finally:
        if engine.draining:
            threading.Event().wait(
                drain.JOIN_LIMIT
            )  # rank 0 has stopped this rank: its process ends here, without a teardown
        for number in ours:
            if signal.getsignal(number) is asked:
                signal.signal(number, _DEFAULTS[number])


def _install(asked: _Asked) -> list[int]:
    if threading.current_thread() is not threading.main_thread():
        return []  # Python lets nobody else
    drain.start()  # first: a signal that is handled must have somebody who acts on it
    ours = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    for number in ours:
        signal.signal(number, asked)
    return ours


class _Asked:
    """The handler. It runs in the main thread, between any two steps of it: it leaves a note, and no more."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __call__(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a child of a fork, which has no thread of ours
            signal.signal(number, _DEFAULTS[number])
            signal.raise_signal(number)
            return
        drain.ask(drain.Order(signal.Signals(number).name))
