"""The parts of a stock generator, found by what they are and not by what they are called: a release may rename them.

A generator is the object whose thread generates: `ResponseGenerator` today. It holds that thread, a queue of requests
and a flag that asks the thread to end.
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

_OURS = str(Path(__file__).parents[1])

# The attributes of stock's generator that are read by name, where they have it.
ATTRIBUTES = (
    "_stop", "_generation_thread", "_generation_failed", "_is_distributed", "_rank", "requests", "model_provider",
    "prompt_cache", "cli_args",
)  # fmt: skip


@dataclass
class Parts:
    """What was found of a generator when it was made; kept in its own __dict__."""

    thread: threading.Thread | None = None
    stop_flag: str | None = None  # the attribute that asks the generation loop to end
    asked_to_stop: bool = False  # somebody has called its stop_and_join


def parts_of(generator: Any) -> Parts:
    """What is known of a generator, to be written to; of an object without a __dict__ nothing is kept."""
    own = getattr(generator, "__dict__", {})
    parts: Parts = own.setdefault("_shim_parts", Parts())
    return parts


def is_asked_to_stop(generator: Any) -> bool:
    """Whether somebody has asked the generator to end."""
    parts = parts_of(generator)
    return parts.asked_to_stop or _is_raised(
        getattr(generator, parts.stop_flag or ATTRIBUTES[0], False)
    )


def ask_to_stop(generator: Any) -> bool:
    """Raise the flag that ends the generation loop, as stock does. False where there is none that is known."""
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
    """Of a boolean, or of a threading.Event."""
    return bool(flag.is_set() if hasattr(flag, "is_set") else flag)


def is_stock(generator: Any) -> bool:
    """Whether it is of a class of mlx_lm, and no class of a program's own."""
    return type(generator).__module__.split(".")[0] == "mlx_lm"


def has_ended(thread: Any) -> bool:
    """Whether a thread, or what a program has in its place, was started and is over."""
    return getattr(thread, "ident", 0) is not None and not thread.is_alive()


def read(generator: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of the generator, one of ATTRIBUTES."""
    if name not in ATTRIBUTES:
        raise ValueError(f"{name} is not in ATTRIBUTES, and no test takes it away")
    return getattr(generator, name, otherwise)


def provider_of(generator: Any) -> Any:
    """What loads and holds the model (stock's ModelProvider), or None."""
    named = read(generator, "model_provider")
    return named if named is not None else _first(generator, "load", "model_key")


def prompt_cache_of(generator: Any) -> Any:
    """Stock's LRUPromptCache, or None."""
    named = read(generator, "prompt_cache")
    return named if named is not None else _first(generator, "insert_cache", "fetch_nearest_cache")


def arguments_of(provider: Any) -> Any:
    """The server's command line, an argparse.Namespace, which a provider holds; or None."""
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
    """The thread that generates: one that the generator holds, else one that runs since `before`."""
    known = read(generator, "_generation_thread")
    if known is not None:
        return known  # type: ignore[no-any-return] # a stand-in of a program is as good
    held = [value for value in _values(generator) if isinstance(value, threading.Thread)]
    started = (
        []
        if before is None
        else [thread for thread in threading.enumerate() if thread not in before]
    )
    return next(iter((*held, *started)), None)


def requests_of(generator: Any) -> queue.Queue[Any] | None:
    """The queue from which the generator takes requests."""
    named = read(generator, "requests")
    if isinstance(named, queue.Queue):
        return named
    return next((value for value in _values(generator) if isinstance(value, queue.Queue)), None)


def stop_flag(generator: Any) -> str | None:
    """The attribute that asks the generation loop to end, by its name of today or as the flag whose name says so."""
    if hasattr(generator, "_stop"):
        return "_stop"
    own = getattr(generator, "__dict__", {})
    flags = [name for name, value in own.items() if _is_flag(value) and "stop" in name.lower()]
    return flags[0] if len(flags) == 1 else None


def _is_flag(value: Any) -> bool:
    return value is False or (hasattr(value, "is_set") and not value.is_set())


def running_generator() -> Any:
    """A generator whose thread runs: an object of mlx_lm that holds the thread which runs a method of it. Or None."""
    for thread in threading.enumerate():
        owner = getattr(getattr(thread, "_target", None), "__self__", None)
        if is_stock(owner) and any(value is thread for value in _values(owner)):
            return owner
    return None


def is_serving() -> bool:
    """Whether some thread accepts connections: a server that was asked to end does not any more."""
    return any(_has_frame(frame, "serve_forever") for frame in sys._current_frames().values())


def frame_of(thread: threading.Thread | None) -> FrameType | None:
    """The frame in which a thread is."""
    return sys._current_frames().get((thread.ident if thread else None) or 0)


def _values(generator: Any) -> list[Any]:
    return list(getattr(generator, "__dict__", {}).values())


def is_of_mlx_lm(filename: str) -> bool:
    """Whether a file is one of the modules right within the package mlx_lm, as server.py is."""
    package = getattr(sys.modules.get("mlx_lm"), "__file__", None)
    return package is not None and Path(filename).parent == Path(package).parent


def runs(generator: Any, code: Any) -> bool:
    """Whether `code` is that of a method of the generator's class."""
    functions = (
        inspect.unwrap(value) for value in vars(type(generator)).values() if callable(value)
    )
    return any(getattr(function, "__code__", None) is code for function in functions)


def is_passed(file: str) -> bool:
    """Whether code of that file only leads to what a thread is for: threading's, wrapt's, or ours."""
    return file.startswith((threading.__file__, _OURS)) or "wrapt" in Path(file).parts


def _has_frame(frame: FrameType | None, name: str) -> bool:
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
