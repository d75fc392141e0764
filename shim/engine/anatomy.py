"""Finds the parts of a stock generator by their types, because a release may rename them.

A generator is the object whose thread generates; today its class is `ResponseGenerator`. It holds
that thread, a queue of requests and a flag that asks the thread to end.
"""

from __future__ import annotations

import argparse
import inspect
import queue
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_SHIM_FOLDER = str(Path(__file__).parents[1])

# The attributes of stock's generator that the shim reads by name, if the release has them.
ATTRIBUTES = (
    "_stop",
    "_generation_thread",
    "_generation_failed",
    "_is_distributed",
    "_rank",
    "requests",
    "model_provider",
    "prompt_cache",
    "cli_args",
)


@dataclass
class Parts:
    """The parts that were found when a generator was made. The generator's __dict__ holds them."""

    thread: threading.Thread | None = None
    # The attribute that asks the generation loop to end.
    stop_flag: str | None = None
    # Whether its stop_and_join was called.
    asked_to_stop: bool = False


def parts_of(generator: Any) -> Parts:
    """Return the parts of a generator; the caller may change them.

    For an object without a __dict__ nothing is kept.
    """
    own = getattr(generator, "__dict__", {})
    parts: Parts = own.setdefault("_shim_parts", Parts())
    return parts


def is_asked_to_stop(generator: Any) -> bool:
    """Whether the generator was asked to end."""
    parts = parts_of(generator)
    if parts.asked_to_stop:
        return True
    return _is_raised(getattr(generator, parts.stop_flag or ATTRIBUTES[0], False))


def ask_to_stop(generator: Any) -> bool:
    """Set the flag that ends the generation loop, as stock does. Return False if there is none."""
    name = parts_of(generator).stop_flag or stop_flag(generator)
    if name is None:
        return False
    flag = getattr(generator, name)
    if hasattr(flag, "is_set"):
        flag.set()
    else:
        setattr(generator, name, True)
    return True


def _is_raised(flag: Any) -> bool:
    """Whether a flag, a boolean or a threading.Event, is set."""
    return bool(flag.is_set() if hasattr(flag, "is_set") else flag)


def is_stock(generator: Any) -> bool:
    """Whether its class is one of mlx_lm, and not one of the program's own."""
    return type(generator).__module__.split(".")[0] == "mlx_lm"


def has_ended(thread: Any) -> bool:
    """Whether a thread, or a program's object in its place, was started and has ended."""
    return getattr(thread, "ident", 0) is not None and not thread.is_alive()


def read(generator: Any, name: str, otherwise: Any = None) -> Any:
    """Return an attribute of the generator, which must be one of ATTRIBUTES."""
    if name not in ATTRIBUTES:
        raise ValueError(f"{name} is not in ATTRIBUTES, so no test takes it away")
    return getattr(generator, name, otherwise)


def provider_of(generator: Any) -> Any:
    """Return stock's ModelProvider, which loads and holds the model, or None."""
    named = read(generator, "model_provider")
    return named if named is not None else _first(generator, "load", "model_key")


def prompt_cache_of(generator: Any) -> Any:
    """Return stock's LRUPromptCache, or None."""
    named = read(generator, "prompt_cache")
    return named if named is not None else _first(generator, "insert_cache", "fetch_nearest_cache")


def arguments_of(provider: Any) -> Any:
    """Return the server's command line, an argparse.Namespace that the provider holds, or None."""
    named = read(provider, "cli_args")
    held = (value for value in _values(provider) if isinstance(value, argparse.Namespace))
    return named if named is not None else next(held, None)


def _first(generator: Any, *attributes: str) -> Any:
    return next(
        (v for v in _values(generator) if all(hasattr(v, name) for name in attributes)), None
    )


def thread_of(
    generator: Any, before: set[threading.Thread] | None = None
) -> threading.Thread | None:
    """Return the generation thread.

    This is a thread that the generator holds, else one that was started after `before`.
    """
    known = read(generator, "_generation_thread")
    if known is not None:
        # A program may have put an object of its own here; that will do.
        return known  # type: ignore[no-any-return]
    held = [value for value in _values(generator) if isinstance(value, threading.Thread)]
    started: list[threading.Thread] = []
    if before is not None:
        started = [thread for thread in threading.enumerate() if thread not in before]
    return next(iter((*held, *started)), None)


def requests_of(generator: Any) -> queue.Queue[Any] | None:
    """Return the queue from which the generator takes requests, or None."""
    named = read(generator, "requests")
    if isinstance(named, queue.Queue):
        return named
    return next((value for value in _values(generator) if isinstance(value, queue.Queue)), None)


def stop_flag(generator: Any) -> str | None:
    """Return the name of the attribute that asks the generation loop to end, or None.

    It is "_stop" today; else it is the only flag that has "stop" in its name.
    """
    if hasattr(generator, "_stop"):
        return "_stop"
    own = getattr(generator, "__dict__", {})
    flags = [name for name, value in own.items() if _is_flag(value) and "stop" in name.lower()]
    return flags[0] if len(flags) == 1 else None


def _is_flag(value: Any) -> bool:
    return value is False or (hasattr(value, "is_set") and not value.is_set())


def running_generator() -> Any:
    """Find a generator whose thread runs, or None.

    It is an object of mlx_lm that holds a thread which runs one of the object's methods.
    """
    for thread in threading.enumerate():
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        if is_stock(owner) and any(value is thread for value in _values(owner)):
            return owner
    return None


def is_serving() -> bool:
    """Whether a thread accepts connections. None does in a server that was asked to end."""
    return any(_has_frame(frame, "serve_forever") for frame in sys._current_frames().values())


def frame_of(thread: threading.Thread | None) -> FrameType | None:
    """Return the current frame of a thread, or None."""
    return sys._current_frames().get((thread.ident if thread else None) or 0)


def _values(generator: Any) -> list[Any]:
    return list(getattr(generator, "__dict__", {}).values())


def is_of_mlx_lm(filename: str) -> bool:
    """Whether a file lies directly in the folder of the package mlx_lm, as server.py does."""
    package = getattr(sys.modules.get("mlx_lm"), "__file__", None)
    return package is not None and Path(filename).parent == Path(package).parent


def runs(generator: Any, code: Any) -> bool:
    """Whether `code` is the code of a method of the generator's class."""
    functions = (
        inspect.unwrap(value) for value in vars(type(generator)).values() if callable(value)
    )
    return any(getattr(function, "__code__", None) is code for function in functions)


def is_passed(file: str) -> bool:
    """Whether code of that file only calls the thread's real work: threading, wrapt or the shim."""
    return file.startswith((threading.__file__, _SHIM_FOLDER)) or "wrapt" in Path(file).parts


def _has_frame(frame: FrameType | None, name: str) -> bool:
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
