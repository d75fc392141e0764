"""The entry of a request in the ledger: its phase, its deliveries, and when they came."""

from __future__ import annotations

import time
from typing import Any, Literal

Phase = Literal["queued", "prefill", "decode", "finished"]
# The generation thread has not taken it up yet.
QUEUED: Phase = "queued"
# Its prompt is in the engine, or waits there for its turn.
PREFILL: Phase = "prefill"
# Its prompt is complete: it should get a token at every step of the engine.
DECODE: Phase = "decode"
# The engine puts nothing more on its queue.
FINISHED: Phase = "finished"

Outcome = Literal["finished", "failed", "abandoned", "timed_out"]


class Entry:
    """The entry of a request, from `ResponseGenerator.generate` until its handler is done.

    The generation thread notes deliveries in it, the handler's thread stops it, and the watchdog
    reads it. Every write is a single assignment, so no lock is needed.
    """

    __slots__ = (
        "context",
        "handler",
        "id",
        "last",
        "mark",
        "opened",
        "outcome",
        "own",
        "parts",
        "phase",
        "processed",
        "progressed",
        "prompt",
        "queue",
        "step",
        "stopped",
        "tokens",
        "total",
    )

    def __init__(self, number: int, parts: tuple[Any, ...], handler: Any, clock: float) -> None:
        self.id = number
        # The objects that were put on the engine's queue. They are compared by identity only: no
        # text of a request goes into a log or a report.
        self.parts = parts
        self.handler = handler
        self.opened = time.monotonic()
        self.phase: Phase = QUEUED
        # When something useful was last delivered, by the engine's clock; and the engine's counts
        # of deliveries and of completed steps right after that.
        self.last = clock
        self.mark = 0
        self.step = 0
        # Tokens of its prompt, once they are known.
        self.prompt = 0
        # Tokens of the prompt that the engine has processed, of those not in the prompt cache; and
        # how many these are, once the first are processed.
        self.processed = 0
        self.total = 0
        # Whether its prompt was seen to advance.
        self.progressed = False
        # Tokens delivered.
        self.tokens = 0
        # The stock GenerationContext, once there is one.
        self.context: Any = None
        self.queue: Any = None
        self.stopped = False
        # The OwnRequest, if the shim made this request itself: no client waits for it.
        self.own: Any = None
        self.outcome: Outcome | None = None

    @property
    def request(self) -> Any:
        """The stock CompletionRequest, or another object that came first on the queue."""
        return self.parts[0] if self.parts else None

    @property
    def length(self) -> int:
        """Tokens that are in its cache, or will be there when its prompt is done."""
        return max(self.prompt, self.processed) + self.tokens

    def describe(self, clock: float) -> dict[str, Any]:
        """Return its figures for a report, without prompt and completion."""
        return {
            "id": self.id,
            "phase": self.phase,
            "age_s": round(time.monotonic() - self.opened, 3),
            "since_delivery_s": round(clock - self.last, 3),
            "prompt": self.prompt,
            "prompt_processed": self.processed,
            "prompt_total": self.total,
            "tokens": self.tokens,
            "stopped": self.stopped,
        }


def stop_context(context: Any) -> None:
    """Make the generation loop end its work for a stock GenerationContext.

    This calls the context's method `stop`, or sets the flag that it would set.
    """
    stop = getattr(context, "stop", None)
    if callable(stop):
        stop()
        return
    for name, value in vars(context).items():
        if value is False and "stop" in name.lower():
            setattr(context, name, True)
