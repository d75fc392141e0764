"""Tries the heart before a server starts: stock's own generator, copied, with stand-ins for whatever is not Python's.

A copy runs stock's code, unwrapped, in milliseconds, with no model, no device and no log line. In it a loop raises, or
stops delivering, and the guard concerned shows that it would act. What cannot be tried so is left untold.
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

LIMIT = 1.0  # seconds for what takes milliseconds
_NAME = "ResponseGenerator"


class Fault(Exception):
    """Raised in the loop that is tried."""


class _StandIn:
    """Whatever the copied code merely passes by: any attribute, call, item or comparison."""

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

    def _no(self, other: object) -> bool:
        return False

    __lt__ = __gt__ = __le__ = __ge__ = _no


class _Raising:
    """A model's provider of which any use raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Fault("raised to see whether it is noticed")


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise Fault("raised to see whether it is noticed")


def _threads() -> tuple[type[threading.Thread], list[threading.Thread]]:
    """A class of threads, and those that were made of it: no other thread of the process has to do with the trial.

    No process waits for one, should the loop that is tried go on.
    """
    made: list[threading.Thread] = []

    class Thread(threading.Thread):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"daemon": True})
            made.append(self)

    return Thread, made


def copied(server: Any, thread: Any) -> type | None:
    """A copy of the server's generator class, or None where there is no class of that name, or it inherits from another.

    What its functions see of mlx, of mlx_lm and of logging are stand-ins; `thread` is what threading.Thread is to them.
    """
    if not verdicts.has(server, _NAME):
        return None
    stock = getattr(server, _NAME)
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
            body[name] = (
                copy(value) if isinstance(inspect.unwrap(value), types.FunctionType) else value
            )
    return type(_NAME, (), body)


def _scope(stock: dict[str, Any], thread: Any) -> dict[str, Any]:
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
    """Whether it is of mlx, of mlx_lm, or logging: none of them may be touched before a server starts."""
    if value is logging:
        return True
    home = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(value, "__module__", None)
    )
    return isinstance(home, str) and home.split(".")[0] in ("mlx", "mlx_lm", "huggingface_hub")


def _made(cls: type, provider: Any) -> Any:
    """An instance, with a stand-in for each argument that its __init__ must have; the first is the model's provider."""
    needed = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    required = [
        p
        for p in needed
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return cls(*[provider, *([_StandIn()] * (len(required) - 1))][: len(required)])


def generator(server: Any) -> Any:
    """A copied generator whose thread does not run, or None where none can be made."""
    try:
        cls = copied(server, _StandIn())
        return None if cls is None else _made(cls, _StandIn())
    except Exception:  # a generator of another make: the trial tells nothing
        return None


def deaths(server: Any, wrap: Callable[[Any], object], hook: Callable[[Any], None]) -> bool:
    """Have the loop of a copy die, with `wrap(module)` applied to it. `hook` gets what threading.excepthook would.

    False where no copy can be made, or where its loop does not end by an exception: nothing is told by that.
    """
    thread, threads = _threads()
    try:
        cls = copied(server, thread)
        if cls is None:
            return False
        wrap(types.SimpleNamespace(**{_NAME: cls}, __name__=server.__name__))
        with _hooked(threads, hook):
            return _is_over(_made(cls, _Raising()), threads)
    except Exception:  # a generator of another make
        return False


def _is_over(made: Any, threads: list[threading.Thread]) -> bool:
    """Whether the threads end once they are given nothing but an exception."""
    requests = anatomy.requests_of(made)
    if requests is not None:
        requests.get = requests.get_nowait = _raise  # type: ignore[method-assign]
        queue.Queue.put(requests, None)  # a loop that waits in the former `get` comes back
    for thread in threads:
        if thread.ident is not None:
            thread.join(LIMIT)
    over = bool(threads) and not any(thread.is_alive() for thread in threads)
    flag = anatomy.stop_flag(made)
    if flag is not None:
        setattr(made, flag, True)
    return over


@contextlib.contextmanager
def _hooked(threads: list[threading.Thread], hook: Callable[[Any], None]) -> Iterator[None]:
    """Give what ends one of the threads to `hook`, and what ends another to whom it would go without us."""
    former = threading.excepthook

    def ours(args: Any) -> None:
        (hook if any(args.thread is thread for thread in threads) else former)(args)

    threading.excepthook = ours
    try:
        yield
    finally:
        if threading.excepthook is ours:
            threading.excepthook = former


def deliveries(server: Any) -> None:
    """Raise LookupError where the generator holds no queue of requests; its queue is what deliveries are seen by."""
    made = generator(server)
    if made is not None:
        queues.watch(made, Engine())


class Asked:
    """A copied generator that has been asked for a completion, by a thread that waits for its first delivery."""

    def __init__(self, made: Any) -> None:
        self.engine = Engine()
        self.error: Exception | None = None  # what `generate` raised
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

    def taken_up(self) -> queue.Queue[Any] | None:
        """The queue of its response, once the request has come; None where none comes."""
        assert self.engine.requests is not None  # noqa: S101 - watch raises otherwise
        try:
            item = self.engine.requests.get(timeout=LIMIT)
        except queue.Empty:
            return None
        return next((part for part in item if isinstance(part, queues.ResponseQueue)), None)

    def answered(self) -> bool:
        """Whether `generate` has returned, or raised."""
        return self._over.wait(LIMIT)


def asked(server: Any) -> Asked | None:
    """None where stock's `generate` cannot be called so."""
    made = generator(server)
    return Asked(made) if made is not None and verdicts.has(server, f"{_NAME}.generate") else None


def in_decode(server: Any) -> tuple[Entry, Engine] | None:
    """Have a copied generator take a request and deliver its first token, and then nothing: (its entry, its engine).

    None where that cannot be tried.
    """
    trial = asked(server)
    responses = None if trial is None else trial.taken_up()
    if trial is None or responses is None:
        return None
    responses.put(types.SimpleNamespace(stop=lambda: None))
    responses.put((1, 1))
    responses.put(types.SimpleNamespace(token=1, text="x"))
    entry = next(iter(trial.engine.entries.values()), None)
    return None if entry is None else (entry, trial.engine)


def is_told(server: Any, error: ShimError) -> bool:
    """Whether a handler that waits for its first delivery gets `error` when all are told. True where it cannot be tried."""
    trial = asked(server)
    if trial is None or trial.taken_up() is None:
        return True
    trial.engine.fail_waiting(error)
    return not trial.answered() or trial.error is error
