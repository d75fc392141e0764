"""What is true of the server now. Guards write to it and read it; nobody keeps a second account of the same facts."""

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
    """A start that waits before it loads its model."""

    reason: str
    until: float  # by time.monotonic

    @property
    def seconds_left(self) -> int:
        """Whole seconds, one at least: for a Retry-After."""
        return max(1, math.ceil(self.until - time.monotonic()))


class Engine:
    """One server's facts: its generation thread, its phase, the ledger of requests and what was delivered to them."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.generator: Any = None
        self.generators: list[
            weakref.ref[Any]
        ] = []  # every generator: a program may make more than one
        self.requests: queue.Queue[Any] | None = (
            None  # from which the generation thread takes what it serves
        )
        self.generating: threading.Thread | None = None  # the thread that took up a request last
        self.booting = False  # the default model, that of --model, is being loaded
        # While the server proves itself: words for what went wrong, made of the error. /health says loading.
        self.proving: Callable[[str], str] | None = None
        self.up = False  # the generation thread has begun to take requests: what was to be loaded at boot is loaded
        self.up_since = math.inf  # when, by time.monotonic
        self.listening = (
            False  # the server accepts connections; only told where a guard asks for it
        )
        self.draining = False  # nothing new is taken in: the process ends when those in flight are done, or their time is
        self.loading = 0  # > 0 while a model is being loaded, at boot or for a request
        self.start_wait: Hold | None = None  # why that waits, and until when
        self.serving_alone = (
            False  # the generation thread serves one request alone, in the loop itself
        )
        self.tokenizing = False  # the generation thread turns somebody's text into tokens
        self.inserting: Entry | None = None  # whose sequence goes into the batch next
        self.batch: Callable[[], Any] = lambda: (
            None
        )  # the BatchGenerator of the requests, not kept alive by this
        self.handling: Entry | None = (
            None  # whose token the generation thread has just turned into text
        )
        self.running = 0  # calls of the server's `run` under way
        self.runner: threading.Thread = threading.main_thread()  # who called it last
        self.run_error: BaseException | None = None  # what ended it
        self.final_error: ShimError | None = (
            None  # what waiting clients are told, once the process is about to end
        )
        self.stalled: str | None = None  # the verdict, while MLX_SHIM_ON_STALL=dump lets a stall be
        # While memory is short: what new requests are told, each by an error of its own.
        self.memory_error: ShimError | None = None
        self.memory: Usage | None = (
            None  # as the watchdog last saw it; only where a guard has it look
        )
        self.ignored_limits: set[str] = (
            set()
        )  # settings of limits that are hardly above what the model takes
        self.steps = 0  # of the batch, completed: each owes a token to every request in decode
        self.turns = 0  # of the generation loop, where it asks for the next request
        self.closed_tokens = 0  # tokens, of prompts computed and made, for requests that are closed
        # Seconds of the engine's own clock: the watchdog advances it, and lets it rest while a model loads, while the
        # server stops, and while the process itself did not run (suspended, or asleep with the machine).
        self.clock = 0.0
        self.deliveries = 0
        self.delivered = 0.0  # when, by the clock
        # Each request is counted once more under its outcome. A request answered 400 is one that failed.
        self.counters = {"requests": 0, "finished": 0, "failed": 0, "abandoned": 0, "timed_out": 0}
        self.entries: dict[int, Entry] = {}
        # Those whose handler is done while the generation thread is not: computed for nobody, until it lets go of them.
        self.abandoned: dict[int, Entry] = {}
        self.serving: dict[int, float] = {}
        self.served = 0  # requests answered with 200
        # By thread, the answers under way; None where deliveries tell more than bytes.
        self.answers: dict[int, Any] = {}
        # Connections taken from a socket that outlives the process, until they are closed: its successor cannot answer them.
        self.accepted: set[Any] = set()
        # .handler: whom this thread serves; .entry: the request it is opening; .inserted: what it put into the batch
        self.local = threading.local()
        self._numbers = itertools.count(1)

    def attach(self, generator: Any, before: set[threading.Thread] | None = None) -> None:
        """Note a generator; the latest is the one that serves. `before`: the threads that ran before it was made."""
        self.generator = generator
        if generator not in self.living():
            self.generators = [known for known in self.generators if known() is not None]
            self.generators.append(weakref.ref(generator))
        parts = anatomy.parts_of(generator)
        parts.thread = anatomy.thread_of(generator, before) or parts.thread
        parts.stop_flag = parts.stop_flag or anatomy.stop_flag(generator)

    def living(self) -> list[Any]:
        """The generators that exist."""
        return [generator for known in list(self.generators) if (generator := known()) is not None]

    def turn(self, *, idle: bool) -> None:
        """The generation loop asks for the next request; `idle`: it waits for one, as it has nothing else to do."""
        self.note_up()
        self.turns += 1
        if idle:
            self.abandoned.clear()

    def note_up(self) -> None:
        """What was to be loaded at boot is loaded."""
        if not self.up:
            self.up_since = time.monotonic()
            self.up = True

    def ask_to_stop(self) -> bool:
        """Raise the flag that ends the generation loop, as stock does. False where there is none that is known."""
        return anatomy.ask_to_stop(self.generator)

    @property
    def uptime(self) -> float:
        """Seconds since the shim was loaded."""
        return time.monotonic() - self.started

    @property
    def age(self) -> float:
        """Seconds for which the generation thread has been up; 0 before. What came first, a wait or a load, is no age."""
        return max(0.0, time.monotonic() - self.up_since)

    @property
    def condition(self) -> Condition:
        """What the server is now, in one word: the first that is true. Takes no lock."""
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
        """Whether the model of --model is being loaded, or the server proves itself."""
        return self.booting or self.proving is not None

    @property
    def own(self) -> Any:
        """The OwnRequest that this thread answers, or None: it answers a client."""
        return self.local.__dict__.get("own")

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop, by SIGINT or by stop_and_join."""
        return anatomy.is_asked_to_stop(self.generator)

    @property
    def closing(self) -> bool:
        """Whether the process is to end, as it was asked to."""
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
        """Whether nothing will be generated any more, though the process lives."""
        thread = self.generation_thread
        gone = thread is not None and anatomy.has_ended(thread)
        return gone or bool(anatomy.read(self.generator, "_generation_failed", otherwise=False))

    @property
    def distributed(self) -> bool:
        return bool(anatomy.read(self.generator, "_is_distributed", otherwise=False))

    @property
    def rank(self) -> int:
        """Which of several machines that share a model this is; 0 is the one that listens."""
        return int(anatomy.read(self.generator, "_rank", 0))

    @property
    def model_name(self) -> str:
        """What --model named, or "none"."""
        return str(getattr(self.arguments, "model", None) or "none")

    @property
    def provider(self) -> Any:
        """Stock's ModelProvider, which loads and holds the model; None where there is none yet."""
        return anatomy.provider_of(self.generator)

    @property
    def arguments(self) -> Any:
        """The command line of the server, as an object with an attribute for each option; None where it is not known."""
        known = anatomy.arguments_of(self.provider)
        return known if known is not None else anatomy.read(self.generator, "cli_args")

    @property
    def prompt_cache(self) -> Any:
        """Stock's LRUPromptCache; None where there is none yet."""
        return anatomy.prompt_cache_of(self.generator)

    @property
    def in_flight(self) -> int:
        """Requests whose handler has not finished answering."""
        return len(self.serving)

    def open(self, parts: tuple[Any, ...], handler: Any) -> Entry:
        """A new entry of the ledger, for what is handed to the engine."""
        entry = Entry(next(self._numbers), parts, handler, self.clock)
        entry.opened = self.serving.get(threading.get_ident(), entry.opened)
        entry.mark, entry.step = self.deliveries, self.steps
        entry.own = self.own
        if entry.own is None:
            self.counters["requests"] += 1
        self.entries[entry.id] = entry
        return entry

    def close(self, entry: Entry) -> None:
        """The handler is done with it: whatever is still generated for it is for nobody."""
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
        """The generation thread has nothing more to do with it."""
        self.abandoned.pop(entry.id, None)
        if entry.handler is None:  # a program called `generate` itself: nobody else will close it
            entry.phase = FINISHED
            self.close(entry)

    def stop(self, entry: Entry) -> None:
        """Have its generation stopped, wherever it is; others go on."""
        entry.stopped = True
        if entry.context is not None:
            stop_context(entry.context)
        elif entry.phase == QUEUED:
            self._withdraw(entry)

    def _withdraw(self, entry: Entry) -> None:
        """Take a request that nobody waits for out of the server's queue."""
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
        """The entry of a stock CompletionRequest, by identity."""
        return next((e for e in self.known() if any(part is request for part in e.parts)), None)

    def known(self) -> list[Entry]:
        """Every request that the engine may be computing for, whether or not its handler still waits."""
        return [*list(self.entries.values()), *list(self.abandoned.values())]

    def fail_waiting(self, error: ShimError) -> None:
        """Wake every waiting handler with `error`."""
        self.final_error = error
        for entry in list(self.entries.values()):
            if entry.queue is not None:
                entry.queue.fail(error)

    def wait_for_handlers(self, seconds: float) -> None:
        """Let the handlers write their last words, for at most so long."""
        deadline = time.monotonic() + seconds
        while (self.serving or self.accepted) and time.monotonic() < deadline:
            threading.Event().wait(0.005)


engine = Engine()
