"""Where the engine's facts come from: wrappers around the stock server that watch it and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import fatal, patch, watchdog
from .engine import engine


def install(server: Any, on_start: Callable[[], None]) -> None:
    """Keep `engine` current, and call `on_start` when a server starts (a mere import of mlx_lm.server is none)."""

    def starts(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        fatal.prepare()
        on_start()
        watchdog.start()
        engine.attach(instance)
        return wrapped(*args, **kwargs)

    patch.wrap(server, "ResponseGenerator.__init__", starts)
    patch.wrap(server, "ModelProvider.load_default", _load_default)
    patch.wrap(server, "APIHandler.handle_completion", _handle_completion)


def _load_default(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    engine.model_is_up = True
    return result


def _handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with engine.serving():
        return wrapped(*args, **kwargs)
