"""/health says ok while the model loads, while the engine is stuck and (0.31.3) after it has died.

/v1/models says so always. Here /health tells the truth, with numbers that a supervisor can use.
/health/live is 200 while the process should be left alone, and /health/ready is 200 while a request
would be served. None of them takes a lock or calls MLX.
"""

from __future__ import annotations

import json
from typing import Any

from .. import __version__
from ..core import answers, patch, report, verdicts
from ..core.errors import RETRY_AFTER, ShimError
from ..engine import answering, facts
from ..engine.state import Condition, engine

UPSTREAM = "mlx-lm 1505, 1791"
MODULE = "mlx_lm.server"
LIVES_BY = {
    ("boot", "turns"): "it is ok while the model of --model is loaded",
    "loads": "it is ok while a model is loaded for a request",
    "deliveries": "counters and seconds_since_delivery are not reliable",
    "handlers": "in_flight counts requests whose body is still being read",
}


def probe(server: Any) -> str:
    verdicts.require(server, f"{answering.name_in(server)}.do_GET")
    found = verdicts.has(server, f"{answering.name_in(server)}.handle_models_request")
    return "" if found else "/v1/models is answered by a dead or stalled server"


def apply(server: Any) -> None:
    handler = answering.name_in(server)
    patch.wrap(server, f"{handler}.do_GET", _do_get)
    patch.try_wrap(server, f"{handler}.handle_models_request", _models)
    patch.try_wrap(server, "get_system_fingerprint", _Once())


# For each path, the conditions that are answered with 200.
_GOOD: dict[str, set[Condition]] = {
    "/health": {"ok"},
    "/health/ready": {"ok"},
    "/health/live": {"ok", "loading", "breaker", "draining"},
}


def _do_get(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    path = instance.path.split("?", 1)[0].rstrip("/")
    if path not in _GOOD:
        return wrapped(*args, **kwargs)
    now, hold = engine.condition, engine.start_wait
    left = hold.seconds_left if hold is not None else RETRY_AFTER
    since = round(engine.clock - engine.delivered, 1) if engine.deliveries else None
    body: dict[str, Any] = {"status": now}
    if hold is not None and now == "breaker":
        body |= {"reason": hold.reason, "seconds_left": left}
    body |= {
        "in_flight": engine.in_flight,
        "seconds_since_delivery": since,
        "uptime": round(engine.uptime, 1),
        "counters": engine.counters,
    }
    if engine.memory is not None:
        body["memory"] = engine.memory._asdict() | {"short": engine.memory_error is not None}
    body["shim"] = __version__
    if facts.shown():
        body["unseen"] = facts.shown()
    body["guards"] = {name: state.kind for name, state in report.states.items()}
    good = now in _GOOD[path] and (engine.memory_error is None or path != "/health/ready")
    answers.send(instance, 200 if good else 503, json.dumps(body).encode(), None if good else left)
    return None


def _models(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    now = engine.condition
    if now in ("dead", "stalled", "draining"):
        error = ShimError(503, f"engine_{now}", f"the server is {now}", RETRY_AFTER)
        answers.send(instance, error.status, json.dumps(error.body()).encode(), error.retry_after)
        return None
    return wrapped(*args, **kwargs)


class _Once:
    """Keeps the fingerprint: stock asks MLX for it at every connection, and it does not change."""

    def __init__(self) -> None:
        self.value: Any = None

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if self.value is None:
            self.value = wrapped(*args, **kwargs)
        return self.value
