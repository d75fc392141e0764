"""Finds out within a deadline whether the engine makes a token now.

A token that any request gets after the question is an answer. Only if no client's request is in the
engine does the probe make a request of its own, one at a time. So it never waits behind a batch,
and adds to none.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from ..core import report
from ..core.errors import ShimError
from .entries import DECODE, FINISHED, Entry
from .own_request import Answer, OwnRequest
from .state import engine

# Seconds between two looks at the entries.
POLL = 0.02
TEXT = "Say one word. (probe of mlx-lm-shim)"
_OK = 200
_one_at_a_time = threading.Lock()


class Verdict(NamedTuple):
    """`status` is "ok", or one word for why there is no token; `by` says whose token came."""

    status: str
    reason: str = ""
    by: str = ""


def ask(server: Any, seconds: float) -> Verdict:
    """Wait for a token for at most so many seconds."""
    deadline = time.monotonic() + seconds
    seen = {entry: entry.tokens for entry in engine.known()}
    probe: _Probe | None = None
    try:
        while True:
            condition = engine.condition
            if condition != "ok":
                return Verdict(condition, _why(condition))
            whose = [entry for entry, before in seen.items() if entry.tokens > before]
            whose = [entry for entry in whose if probe is None or entry.own is not probe.own]
            if whose:
                return Verdict("ok", by="requests" if whose[0].own is None else "probe")
            seen |= {entry: 0 for entry in engine.known() if entry not in seen}
            if probe is None and not _others() and _one_at_a_time.acquire(blocking=False):
                named = _model()
                if named is None:
                    _one_at_a_time.release()
                    return Verdict("no_model", "no model is loaded, and --model names none")
                probe = _Probe(server, named)
            if probe is not None and probe.verdict is not None:
                return probe.verdict
            if time.monotonic() >= deadline:
                return _late(seconds)
            threading.Event().wait(POLL)
    finally:
        if probe is not None:
            probe.give_up(seconds)


def _others() -> list[Entry]:
    """Return the requests of clients in the engine, also those whose client has left."""
    return [entry for entry in engine.known() if entry.own is None and entry.phase != FINISHED]


def _why(condition: str) -> str:
    if condition == "breaker" and engine.start_wait is not None:
        return engine.start_wait.reason
    if condition == "stalled" and engine.stalled:
        return engine.stalled
    return f"the server is {condition}"


def _late(seconds: float) -> Verdict:
    """No token came. While a client's prompt is computed, which may take longer, it is busy."""
    others = _others()
    in_decode = sum(entry.phase == DECODE for entry in others)
    silence = engine.clock - engine.delivered
    what = (
        f"no token for {seconds:g} s; requests in the engine: {len(others)}, past their prompt: "
        f"{in_decode}; the last delivery was {silence:.0f} s ago"
    )
    return Verdict("busy" if in_decode < len(others) else "no_token", what)


def _model() -> dict[str, str] | None:
    """Return the fields that name the loaded model in a request; None if there is no model."""
    key = getattr(engine.provider, "model_key", None)
    arguments = engine.arguments
    default = getattr(arguments, "model", None)
    if key is None or not isinstance(key, tuple) or key[0] == default:
        return None if default is None else {}
    adapter = key[1] if len(key) > 1 else None
    return {"model": key[0]} | ({} if adapter is None else {"adapters": adapter})


class _Probe:
    """One own request for one token, made in a thread of its own."""

    def __init__(self, server: Any, named: dict[str, str]) -> None:
        self.verdict: Verdict | None = None
        self._server = server
        self.own = OwnRequest("/v1/completions", {"prompt": TEXT, "max_tokens": 1} | named, 1)
        try:
            threading.Thread(target=self._run, name="mlx-shim-probe", daemon=True).start()
        except RuntimeError as error:
            _one_at_a_time.release()
            self.verdict = Verdict("no_token", f"no thread can be started: {error}")

    def _run(self) -> None:
        try:
            self.verdict = _judged(self.own.answer(self._server))
        except Exception as error:
            self.verdict = Verdict("unmade", f"no request could be made: {report.one_line(error)}")
        finally:
            _one_at_a_time.release()

    def give_up(self, seconds: float) -> None:
        """End the request, if it still runs: the question is over."""
        if self.verdict is None:
            self.own.end(ShimError(504, "request_timeout", f"the probe waited for {seconds:g} s"))


def _judged(answer: Answer) -> Verdict:
    if answer.status == _OK:
        return Verdict("ok", by="probe")
    return Verdict("failed", answer.message or f"the request was answered {answer.status}")
