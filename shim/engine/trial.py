"""Tries the most important guards on a copy of stock's generator, before a server starts.

The copy runs stock's code, unwrapped, in milliseconds: without a model, a device or a log line,
because stand-ins replace the objects of mlx and mlx_lm. In a trial the loop raises, or stops
delivering, and the guard shows whether it would act. If a release cannot be tried in this way, the
trial tells nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..core import verdicts
from ..core.errors import ShimError
from . import anatomy, queues
from .entries import Entry
from .state import Engine

# Seconds that a trial waits for a step, which takes milliseconds.
WAIT_LIMIT = 1.0
_GENERATOR = "ResponseGenerator"


class Fault(Exception):
    """Raised in a loop to see whether its end is noticed."""


class _StandIn:
    """An object that the copied code can use in any way: attribute, call, item or comparison."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: object) -> Any:
        return self

    def _compare(self, other: object) -> bool:
        return False

    __lt__ = __gt__ = __le__ = __ge__ = _compare


class _Raising:
    """A model's provider that raises at any use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Fault("raised to see whether it is noticed")


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise Fault("raised to see whether it is noticed")


def _make_thread_class() -> tuple[type[threading.Thread], list[threading.Thread]]:
    """Make a class of threads, and the list of its instances: only these belong to the trial.

    They are daemon threads, so that no process waits for a loop that goes on.
    """
    made: list[threading.Thread] = []

    class Thread(threading.Thread):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"daemon": True})
            made.append(self)

    return Thread, made


def copy_class(server: Any, thread: Any) -> type | None:
    """Copy the server's generator class.

    Its functions see stand-ins for the objects of mlx, mlx_lm and logging, and `thread` for
    threading.Thread. Returns None if there is no class of that name, or if it inherits from another
    one.
    """
    if not verdicts.has(server, _GENERATOR):
        return None
    stock = getattr(server, _GENERATOR)
    if not isinstance(stock, type) or stock.__mro__[1:] != (object,):
        return None
    scopes: dict[int, dict[str, Any]] = {}

    def copy(function: Any) -> Any:
        plain = inspect.unwrap(function)
        scope = scopes.setdefault(id(plain.__globals__), _scope(plain.__globals__, thread))
        made = types.FunctionType(
            plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__
        )
        made.__kwdefaults__ = plain.__kwdefaults__
        return made

    body: dict[str, Any] = {}
    for name, value in vars(stock).items():
        if isinstance(value, property):
            body[name] = property(copy(value.fget))
        elif isinstance(value, (staticmethod, classmethod)):
            body[name] = type(value)(copy(value.__func__))
        elif name not in ("__dict__", "__weakref__"):
            is_function = isinstance(inspect.unwrap(value), types.FunctionType)
            body[name] = copy(value) if is_function else value
    return type(_GENERATOR, (), body)


def _scope(stock: dict[str, Any], thread: Any) -> dict[str, Any]:
    """Return the globals that the copied functions see."""
    scope: dict[str, Any] = {
        name: _StandIn() if _is_foreign(value) else value for name, value in stock.items()
    }
    for name, value in stock.items():
        if value is threading.Thread:
            scope[name] = thread
        elif value is threading:
            scope[name] = types.SimpleNamespace(**vars(threading) | {"Thread": thread})
    return scope


def _is_foreign(value: Any) -> bool:
    """Whether an object belongs to mlx, mlx_lm, huggingface_hub or logging.

    Nothing may use these before a server starts.
    """
    if value is logging:
        return True
    is_module = isinstance(value, types.ModuleType)
    home = value.__name__ if is_module else getattr(value, "__module__", None)
    return isinstance(home, str) and home.split(".")[0] in ("mlx", "mlx_lm", "huggingface_hub")


def _make(cls: type, provider: Any) -> Any:
    """Make an instance, with `provider` and a stand-in for each other argument that it requires."""
    needed = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    required = [
        p
        for p in needed
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return cls(*[provider, *([_StandIn()] * (len(required) - 1))][: len(required)])


def generator(server: Any) -> Any:
    """Return a copied generator whose thread does not run, or None if none can be made."""
    try:
        cls = copy_class(server, _StandIn())
        return None if cls is None else _make(cls, _StandIn())
    except Exception:
        # This generator works differently, and the trial tells nothing.
        return None


def try_death(server: Any, wrap: Callable[[Any], object], hook: Callable[[Any], None]) -> bool:
    """Make the loop of a copy die, after `wrap(module)` has wrapped the copy.

    `hook` gets what threading.excepthook would get. Returns False if no copy can be made, or if an
    exception does not end its loop: then the trial tells nothing.
    """
    thread, threads = _make_thread_class()
    try:
        cls = copy_class(server, thread)
        if cls is None:
            return False
        wrap(types.SimpleNamespace(**{_GENERATOR: cls}, __name__=server.__name__))
        with _hook_threads(threads, hook):
            return _is_over(_make(cls, _Raising()), threads)
    except Exception:
        # This generator works differently.
        return False


def _is_over(made: Any, threads: list[threading.Thread]) -> bool:
    """Whether the threads end when everything that they use raises."""
    requests = anatomy.requests_of(made)
    if requests is not None:
        requests.get = requests.get_nowait = _raise  # type: ignore[method-assign]
        # A loop that waits in the former `get` comes back.
        queue.Queue.put(requests, None)
    for thread in threads:
        if thread.ident is not None:
            thread.join(WAIT_LIMIT)
    over = bool(threads) and not any(thread.is_alive() for thread in threads)
    flag = anatomy.stop_flag(made)
    if flag is not None:
        setattr(made, flag, True)
    return over


@contextlib.contextmanager
def _hook_threads(threads: list[threading.Thread], hook: Callable[[Any], None]) -> Iterator[None]:
    """Call `hook` when an exception ends one of `threads`, and the former hook for any other."""
    former = threading.excepthook

    def own_hook(args: Any) -> None:
        (hook if any(args.thread is thread for thread in threads) else former)(args)

    threading.excepthook = own_hook
    try:
        yield
    finally:
        if threading.excepthook is own_hook:
            threading.excepthook = former


def try_deliveries(server: Any) -> None:
    """Raise LookupError if the generator holds no queue of requests: deliveries are seen there."""
    made = generator(server)
    if made is not None:
        queues.watch(made, Engine())


class TrialRequest:
    """A request to a copied generator, by a thread that waits for its first delivery."""

    def __init__(self, made: Any) -> None:
        self.engine = Engine()
        # The exception that `generate` has raised.
        self.error: Exception | None = None
        self._over = threading.Event()
        queues.watch(made, self.engine)
        threading.Thread(target=self._ask, args=(made.generate,), daemon=True).start()

    def _ask(self, generate: Any) -> None:
        needed = [
            p for p in inspect.signature(generate).parameters.values() if p.default is p.empty
        ]
        try:
            generate(*[_StandIn() for _ in needed])
        except Exception as error:
            self.error = error
        self._over.set()

    def take_up(self) -> queue.Queue[Any] | None:
        """Take the request from its queue, and return the queue of its response.

        Returns None if no request comes.
        """
        # `queues.watch` raises otherwise.
        assert self.engine.requests is not None  # noqa: S101
        try:
            item = self.engine.requests.get(timeout=WAIT_LIMIT)
        except queue.Empty:
            return None
        return next((part for part in item if isinstance(part, queues.ResponseQueue)), None)

    def is_answered(self) -> bool:
        """Whether `generate` returns or raises in time."""
        return self._over.wait(WAIT_LIMIT)


def ask(server: Any) -> TrialRequest | None:
    """Ask a copied generator for a completion, or return None if that is not possible."""
    made = generator(server)
    if made is None or not verdicts.has(server, f"{_GENERATOR}.generate"):
        return None
    return TrialRequest(made)


def try_decode(server: Any) -> tuple[Entry, Engine] | None:
    """Make a copied generator take a request and deliver its first token, and then nothing.

    Returns the entry of the request and the engine, or None if that cannot be tried.
    """
    trial = ask(server)
    responses = None if trial is None else trial.take_up()
    if trial is None or responses is None:
        return None
    responses.put(types.SimpleNamespace(stop=lambda: None))
    responses.put((1, 1))
    responses.put(types.SimpleNamespace(token=1, text="x"))
    entry = next(iter(trial.engine.entries.values()), None)
    return None if entry is None else (entry, trial.engine)


def is_told(server: Any, error: ShimError) -> bool:
    """Whether a handler that waits for its first delivery gets `error` when all clients are told.

    True if that cannot be tried.
    """
    trial = ask(server)
    if trial is None or trial.take_up() is None:
        return True
    trial.engine.fail_waiting(error)
    return not trial.is_answered() or trial.error is error
