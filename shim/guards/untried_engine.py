"""/health says what the server knows; an idle engine may no longer work, and no request shows it.

Here GET /health/generate (or /health_generate) is answered with 200 once a token has come out of
the engine since the question. While clients are served, a token of theirs is enough. While the
engine is idle, the shim makes one short request of its own, one at a time. After 20 seconds
(?timeout=) the answer is 503, with the reason. `python -m shim probe URL` asks it. Where there is a
key, the client must bring it.
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..core import answers, patch
from ..core.errors import RETRY_AFTER, ShimError, invalid
from ..core.values import parse_duration
from ..core.verdicts import require
from ..engine import answering, generation_probe, own_request

UPSTREAM = "no issue known; SGLang has /health_generate"
MODULE = "mlx_lm.server"
LIVES_BY = {
    "deliveries": "it does not see the tokens of clients, and always makes a request of its own"
}

PATHS = ("/health/generate", "/health_generate")
# Seconds for a token, if the question gives none, and at most.
DEFAULT_TIMEOUT = 20.0
LONGEST_TIMEOUT = 600.0


def probe(server: Any) -> None:
    handler = answering.name_in(server)
    require(server, f"{handler}.do_GET", f"{handler}.do_POST")


def apply(server: Any) -> None:
    patch.wrap(server, f"{answering.name_in(server)}.do_GET", _Door(server).do_get)
    own_request.install(server)


class _Door:
    def __init__(self, server: Any) -> None:
        self._server = server

    def do_get(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        url = urlsplit(instance.path)
        if url.path.rstrip("/") not in PATHS:
            return wrapped(*args, **kwargs)
        try:
            seconds = _seconds(url.query)
        except ShimError as error:
            answers.send(instance, error.status, json.dumps(error.body()).encode())
            return None
        begun = time.monotonic()
        told = generation_probe.ask(self._server, seconds)
        body = {name: value for name, value in told._asdict().items() if value}
        body["seconds"] = round(time.monotonic() - begun, 3)
        good = told.status == "ok"
        answers.send(
            instance,
            200 if good else 503,
            json.dumps(body).encode(),
            None if good else RETRY_AFTER,
        )
        return None


def _seconds(query: str) -> float:
    given = parse_qs(query, keep_blank_values=True).get("timeout")
    if given is None:
        return DEFAULT_TIMEOUT
    try:
        seconds = parse_duration(given[-1])
    except ValueError as error:
        raise invalid("timeout", f"timeout is {given[-1][:50]!r}; {error}") from None
    if not 0 < seconds <= LONGEST_TIMEOUT:
        accepted = f"up to {LONGEST_TIMEOUT:g} seconds, not 0"
        raise invalid("timeout", f"timeout is {given[-1][:50]!r}; accepted: {accepted}")
    return seconds
