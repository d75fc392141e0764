"""Holds what is true of the server now. Guards read and write it; no fact is kept a second time."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..core.errors import ShimError
from ..core.memory import Usage
from . import anatomy
from .entries import FINISHED, QUEUED, Entry, stop_context

Condition = Literal["ok", "loading", "breaker", "stalled", "dead", "draining"]


class Hold(NamedTuple):
    """A wait of a start, before it loads the model."""

    reason: str
    # When it ends, by time.monotonic.
    until: float

    @property
    def seconds_left(self) -> int:
        """Whole seconds, at least one, for a Retry-After."""
        return max(1, math.ceil(self.until - time.monotonic()))


class Engine:
    """The facts of one server: its generation thread, its phase, and the ledger of its requests."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        # The generator that serves, and every living one: a program may make more than one.
        self.generator: Any = None
        self.generators: list[weakref.ref[Any]] = []
        # The queue from which the generation thread takes requests.
        self.requests: queue.Queue[Any] | None = None
        # The thread that took up a request last.
        self.generating: threading.Thread | None = None
        # Whether the default model, the one of --model, is being loaded.
        self.booting = False
        # While the server proves itself: turns an error into the reason of the exit. /health says
        # loading.
        self.proving: Callable[[str], str] | None = None
        # Whether the generation thread takes requests: then the model of the boot is loaded.
        self.up = False
        # Since when, by time.monotonic.
        self.up_since = math.inf
        # Whether the server accepts connections. Only set if a guard needs it.
        self.listening = False
        # Whether new requests are refused: the process ends when those in flight have finished, or
        # their time is over.
        self.draining = False
        # > 0 while a model is being loaded, at boot or for a request.
        self.loading = 0
        # Why the load at boot waits, and until when.
        self.start_wait: Hold | None = None
        # Whether the generation thread serves one request alone, in the loop itself.
        self.serving_alone = False
        # Whether the generation thread turns the text of a request into tokens.
        self.tokenizing = False
        # The request whose sequence goes into the batch next.
        self.inserting: Entry | None = None
        # Returns the BatchGenerator of the requests; does not keep it alive.
        self.batch: Callable[[], Any] = lambda: None
        # The request whose token the generation thread has just turned into text.
        self.handling: Entry | None = None
        # Calls of the server's `run` under way, the thread of the last one, and what ended it.
        self.running = 0
        self.runner: threading.Thread = threading.main_thread()
        self.run_error: BaseException | None = None
        # The error that waiting clients get, once the process is about to end.
        self.final_error: ShimError | None = None
        # The verdict on a stall that MLX_SHIM_ON_STALL=dump lets go on.
        self.stalled: str | None = None
        # While memory is short, the error for new requests. Each gets an error object of its own.
        self.memory_error: ShimError | None = None
        # The memory in use, as the watchdog last saw it. Only set if a guard needs it.
        self.memory: Usage | None = None
        # The settings of limits that are hardly above what the model itself needs.
        self.ignored_limits: set[str] = set()
        # Completed steps of the batch. Each should give a token to every request in decode.
        self.steps = 0
        # Turns of the generation loop: in each it asks for the next request.
        self.turns = 0
        # Tokens of closed requests, computed for prompts or generated.
        self.closed_tokens = 0
        # The engine's own clock, in seconds. The watchdog advances it. It rests while a model
        # loads, while the server stops, and while the process does not run (suspended, or asleep
        # with the machine).
        self.clock = 0.0
        # How many deliveries there were, and when the last one was, by the clock.
        self.deliveries = 0
        self.delivered = 0.0
        # Each request counts once in "requests" and once under its outcome. A request answered 400
        # counts as failed.
        self.counters = {"requests": 0, "finished": 0, "failed": 0, "abandoned": 0, "timed_out": 0}
        # The requests whose handler waits, by their number.
        self.entries: dict[int, Entry] = {}
        # The requests whose handler is done, while the generation thread still computes for them.
        self.abandoned: dict[int, Entry] = {}
        # For each HTTP thread that answers a request: since when, by time.monotonic.
        self.serving: dict[int, float] = {}
        # Requests answered with 200.
        self.served = 0
        # The answer under way of each HTTP thread; None if deliveries tell more than bytes.
        self.answers: dict[int, Any] = {}
        # Open connections that came from a socket which outlives the process: the next process
        # cannot answer them.
        self.accepted: set[Any] = set()
        # Of each thread. handler: the handler that runs in it; opened: the entry of its request;
        # asking: whether it is in stock's `generate`; status: the status of its answer; inserted:
        # the entry whose sequence it has put into the batch.
        self.local = threading.local()
        self._numbers = itertools.count(1)

    def attach(self, generator: Any, before: set[threading.Thread] | None = None) -> None:
        """Note a generator and its parts; the latest is the one that serves.

        `before` holds the threads that ran before it was made.
        """
        self.generator = generator
        if generator not in self.living():
            self.generators = [known for known in self.generators if known() is not None]
            self.generators.append(weakref.ref(generator))
        parts = anatomy.parts_of(generator)
        parts.thread = anatomy.thread_of(generator, before) or parts.thread
        parts.stop_flag = parts.stop_flag or anatomy.stop_flag(generator)

    def living(self) -> list[Any]:
        """List the generators that still exist."""
        return [generator for known in list(self.generators) if (generator := known()) is not None]

    def turn(self, *, idle: bool) -> None:
        """Note that the generation loop asks for the next request.

        `idle` says that it waits for one, because it has nothing else to do.
        """
        self.note_up()
        self.turns += 1
        if idle:
            self.abandoned.clear()

    def note_up(self) -> None:
        """Note that the model of the boot is loaded."""
        if not self.up:
            self.up_since = time.monotonic()
            self.up = True

    def ask_to_stop(self) -> bool:
        """Set the flag that ends the generation loop, as stock does. False if there is none."""
        return anatomy.ask_to_stop(self.generator)

    @property
    def uptime(self) -> float:
        """Seconds since the shim was loaded."""
        return time.monotonic() - self.started

    @property
    def age(self) -> float:
        """Seconds since the generation thread came up, 0 before; no wait or load counts."""
        return max(0.0, time.monotonic() - self.up_since)

    @property
    def condition(self) -> Condition:
        """The condition of the server: the first one that is true. Takes no lock."""
        if self.closing:
            return "draining"
        if self.final_error is not None or self.generation_is_over:
            return "dead"
        if self.stalled is not None:
            return "stalled"
        if self.start_wait is not None:
            return "breaker"
        return "loading" if self.is_starting or self.loading else "ok"

    @property
    def is_starting(self) -> bool:
        """Whether the model of --model is being loaded, or the self-check is under way."""
        return self.booting or self.proving is not None

    @property
    def own(self) -> Any:
        """The OwnRequest that this thread answers; None if it answers a client."""
        return self.local.__dict__.get("own")

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop, by SIGINT or by stop_and_join."""
        return anatomy.is_asked_to_stop(self.generator)

    @property
    def closing(self) -> bool:
        """Whether the process was asked to end."""
        return self.draining or self.stopping

    @property
    def generation_thread(self) -> threading.Thread | None:
        return (
            anatomy.thread_of(self.generator)
            or anatomy.parts_of(self.generator).thread
            or self.generating
        )

    @property
    def generation_is_over(self) -> bool:
        """Whether the generation thread has ended, though the process lives."""
        thread = self.generation_thread
        gone = thread is not None and anatomy.has_ended(thread)
        return gone or bool(anatomy.read(self.generator, "_generation_failed", otherwise=False))

    @property
    def distributed(self) -> bool:
        return bool(anatomy.read(self.generator, "_is_distributed", otherwise=False))

    @property
    def rank(self) -> int:
        """The number of this machine among those that share a model; 0 is the one that listens."""
        return int(anatomy.read(self.generator, "_rank", 0))

    @property
    def model_name(self) -> str:
        """The name that --model gives, or "none"."""
        return str(getattr(self.arguments, "model", None) or "none")

    @property
    def provider(self) -> Any:
        """Stock's ModelProvider, which loads and holds the model; None if there is none yet."""
        return anatomy.provider_of(self.generator)

    @property
    def arguments(self) -> Any:
        """The server's command line, with an attribute for each option; None if it is unknown."""
        known = anatomy.arguments_of(self.provider)
        return known if known is not None else anatomy.read(self.generator, "cli_args")

    @property
    def prompt_cache(self) -> Any:
        """Stock's LRUPromptCache; None if there is none yet."""
        return anatomy.prompt_cache_of(self.generator)

    @property
    def in_flight(self) -> int:
        """Requests whose handler has not finished answering."""
        return len(self.serving)

    def open(self, parts: tuple[Any, ...], handler: Any) -> Entry:
        """Open an entry for a request that goes to the engine."""
        entry = Entry(next(self._numbers), parts, handler, self.clock)
        entry.opened = self.serving.get(threading.get_ident(), entry.opened)
        entry.mark, entry.step = self.deliveries, self.steps
        entry.own = self.own
        if entry.own is None:
            self.counters["requests"] += 1
        self.entries[entry.id] = entry
        return entry

    def close(self, entry: Entry) -> None:
        """Close an entry whose handler is done, and stop what is still generated for it."""
        if self.entries.pop(entry.id, None) is None:
            return
        if entry.own is None:
            self.closed_tokens += entry.processed + entry.tokens
        if entry.phase != FINISHED:
            self.abandoned[entry.id] = entry
        self.stop(entry)
        if entry.own is None:
            self.counters[entry.outcome or "abandoned"] += 1

    def let_go(self, entry: Entry) -> None:
        """Note that the generation thread has nothing more to do with a request."""
        self.abandoned.pop(entry.id, None)
        # Without a handler, a program has called `generate` itself, and nothing else closes it.
        if entry.handler is None:
            entry.phase = FINISHED
            self.close(entry)

    def stop(self, entry: Entry) -> None:
        """Stop the generation for one request, in whatever phase it is. The others go on."""
        entry.stopped = True
        if entry.context is not None:
            stop_context(entry.context)
        elif entry.phase == QUEUED:
            self._withdraw(entry)

    def _withdraw(self, entry: Entry) -> None:
        """Take a request that no client waits for out of the server's queue."""
        requests = self.requests
        if requests is not None:
            with requests.mutex:
                for index, item in enumerate(requests.queue):
                    if isinstance(item, (tuple, list)) and any(
                        part is entry.queue for part in item
                    ):
                        del requests.queue[index]
                        entry.phase = FINISHED
                        self.let_go(entry)
                        break

    def entry_of(self, request: Any) -> Entry | None:
        """Return the entry of a stock CompletionRequest, compared by identity, or None."""
        return next((e for e in self.known() if any(part is request for part in e.parts)), None)

    def known(self) -> list[Entry]:
        """List every request that the engine may compute for, even if its handler is done."""
        return [*list(self.entries.values()), *list(self.abandoned.values())]

    def fail_waiting(self, error: ShimError) -> None:
        """Wake every waiting handler with `error`."""
        self.final_error = error
        for entry in list(self.entries.values()):
            if entry.queue is not None:
                entry.queue.fail(error)

    def wait_for_handlers(self, seconds: float) -> None:
        """Wait until the handlers have written their last bytes, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (self.serving or self.accepted) and time.monotonic() < deadline:
            threading.Event().wait(0.005)


engine = Engine()
