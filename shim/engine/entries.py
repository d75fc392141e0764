"""One request in the ledger: its phase, what was delivered to it, and when."""

from __future__ import annotations

import time
from typing import Any, Literal

Phase = Literal["queued", "prefill", "decode", "finished"]
QUEUED: Phase = "queued"  # not yet taken up by the generation thread
PREFILL: Phase = "prefill"  # its prompt is in the engine, or waits there for its turn
DECODE: Phase = "decode"  # its prompt is complete: every step of the engine owes it a token
FINISHED: Phase = "finished"  # nothing more will be put on its queue

Outcome = Literal["finished", "failed", "abandoned", "timed_out"]


class Entry:
    """One request in the ledger, from `ResponseGenerator.generate` until its handler is done.

    The generation thread notes deliveries, the handler's thread stops it, the watchdog reads. Every write is a single
    assignment, so nobody needs a lock.
    """

    __slots__ = (
        "context", "handler", "id", "last", "mark", "opened", "outcome", "own", "parts", "phase", "processed",
        "progressed", "prompt", "queue", "step", "stopped", "tokens", "total",
    )  # fmt: skip

    def __init__(self, number: int, parts: tuple[Any, ...], handler: Any, clock: float) -> None:
        self.id = number
        # What was handed to the engine, for its identity only: nothing of a request's text goes into a log or a report.
        self.parts = parts
        self.handler = handler
        self.opened = time.monotonic()
        self.phase: Phase = QUEUED
        self.last = clock  # when something useful was last delivered, by the engine's clock
        self.mark = 0  # the engine's count of deliveries right after that
        self.step = 0  # and of its completed steps
        self.prompt = 0  # tokens of its prompt, once they are known
        self.processed = 0  # of those that were not in the prompt cache
        self.total = 0  # how many these are, once the first were processed
        self.progressed = False  # whether its prompt has been seen to advance
        self.tokens = 0
        self.context: Any = None  # the stock GenerationContext, once there is one
        self.queue: Any = None
        self.stopped = False
        # The OwnRequest, where it is one of the shim's: no client waits for it.
        self.own: Any = None
        self.outcome: Outcome | None = None

    @property
    def request(self) -> Any:
        """The stock CompletionRequest, or what else was handed over first."""
        return self.parts[0] if self.parts else None

    @property
    def length(self) -> int:
        """Tokens that are in its cache, or will be when its prompt is done."""
        return max(self.prompt, self.processed) + self.tokens

    def describe(self, clock: float) -> dict[str, Any]:
        """Numbers for a report; no prompt, no completion."""
        return {
            "id": self.id, "phase": self.phase, "age_s": round(time.monotonic() - self.opened, 3),
            "since_delivery_s": round(clock - self.last, 3), "prompt": self.prompt,
            "prompt_processed": self.processed, "prompt_total": self.total, "tokens": self.tokens, "stopped": self.stopped,
        }  # fmt: skip


def stop_context(context: Any) -> None:
    """Have the generation loop end what it does for a stock GenerationContext, by its method or by the flag behind it."""
    stop = getattr(context, "stop", None)
    if callable(stop):
        stop()
        return
    for name, value in vars(context).items():
        if value is False and "stop" in name.lower():
            setattr(context, name, True)
