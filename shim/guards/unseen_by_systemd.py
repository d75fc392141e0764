"""systemd sees the server as started while its model loads, and as healthy while its process lives.

Here, where NOTIFY_SOCKET is set (Type=notify), the shim tells systemd READY=1 when the model is
loaded and the port is open, STATUS, STOPPING=1, and with WatchdogSec= also WATCHDOG=1 as long as
the server is not stalled. So systemd restarts it when the interpreter stands still, or after a
stall that MLX_SHIM_ON_STALL=dump does not end. A start that waits, or loads, asks for more time
than TimeoutStartSec= gives it (90 seconds by default). The variables stay in the environment:
systemd listens to the main process only, unless NotifyAccess= says otherwise.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from typing import Any

from ..core import patch, report, sd_notify
from ..core.verdicts import Incompatible, NotConfigured, require
from ..engine import drain, facts, watchdog
from ..engine.state import engine

UPSTREAM = "no issue known"
MODULE = "mlx_lm.server"
LIVES_BY = {("turns", "boot"): facts.NEEDED}

# A start that goes on asks for so much more time, and asks again after so long.
EXTEND_SECONDS = 60.0
EXTEND_AGAIN_SECONDS = 5.0


def probe(server: Any) -> None:
    if not os.environ.get("NOTIFY_SOCKET"):
        raise NotConfigured("NOTIFY_SOCKET is not set")
    if sd_notify.address() is None:
        raise Incompatible("NOTIFY_SOCKET does not name a UNIX socket")
    require(server, "_run_http_server")
    if "server_class" not in inspect.signature(server._run_http_server).parameters:
        raise Incompatible("_run_http_server has no server_class")


def apply(server: Any) -> None:
    told = _Told()
    patch.wrap(server, "_run_http_server", _listening)
    drain.on_begin.append(told.look)
    watchdog.add(told.look)


def _listening(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Make the server note when it begins to listen."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    stock = call.arguments["server_class"]

    def serve_forever(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine.listening = True
        return stock.serve_forever(self, *args, **kwargs)

    call.arguments["server_class"] = type(
        stock.__name__, (stock,), {"serve_forever": serve_forever}
    )
    return wrapped(*call.args, **call.kwargs)


def status() -> str:
    """The text of `systemctl status`: the engine's condition, or its reason, and the model."""
    condition, hold = engine.condition, engine.start_wait
    if condition == "stalled":
        return engine.stalled or condition
    if condition == "breaker" and hold is not None:
        return hold.reason
    if condition == "loading":
        return f"loading a model (--model {engine.model_name})"
    if condition == "ok":
        return f"{'serving' if _is_up() else 'starting'} (--model {engine.model_name})"
    return condition


def _is_up() -> bool:
    """Whether the model is loaded, and its self-check is over."""
    return engine.up and engine.proving is None


class _Told:
    """Tells systemd, and keeps what it has told. A message that fails is sent at the next look."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._ready = self._stopping = False
        self._status = ""
        self._alive = 0.0
        self._extended = -EXTEND_AGAIN_SECONDS
        self._loading: float | None = None
        self._interval: float | None = None
        self._asked = self._complained = False

    def look(self) -> None:
        """Called by the watchdog, and by the thread of the drain when it begins."""
        try:
            with self._one_at_a_time:
                self._tell(time.monotonic())
        except (OSError, ValueError) as error:
            if not self._complained:
                self._complained = True
                report.line_nowait(f"systemd could not be told: {error}")

    def _tell(self, now: float) -> None:
        if not self._asked:
            self._asked = True
            self._interval = sd_notify.watchdog_interval()
        if not self._ready and _is_up() and engine.listening and not engine.closing:
            sd_notify.send(READY=1)
            self._ready = True
        if not self._stopping and engine.closing:
            sd_notify.send(STOPPING=1)
            self._stopping = True
        said = report.one_line(status())
        if said != self._status:
            sd_notify.send(STATUS=said)
            self._status = said
        if not self._is_sound(now):
            return
        if not _is_up() and not self._stopping and now - self._extended >= EXTEND_AGAIN_SECONDS:
            sd_notify.send(EXTEND_TIMEOUT_USEC=int(EXTEND_SECONDS * 1e6))
            self._extended = now
        if self._interval is not None and now - self._alive >= self._interval - watchdog.POLL:
            sd_notify.send(WATCHDOG=1)
            self._alive = now

    def _is_sound(self, now: float) -> bool:
        is_ending = engine.final_error is not None or engine.generation_is_over
        if is_ending or engine.stalled is not None:
            return False
        if (_is_up() and not engine.loading) or engine.start_wait is not None:
            self._loading = None
            return True
        if self._loading is None:
            self._loading = now
        return now - self._loading < sd_notify.LOADING_LIMIT
