"""What is true of the server now. Guards write to it and read it; nobody keeps a second account of the same facts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_own = threading.get_ident


class Engine:
    """One server's facts: its generation thread, whether the model came up, and the requests its handlers serve.

    Every write is one assignment or one dict operation, atomic under the GIL, so no reader needs a lock.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.generator: Any = None
        self.model_is_up = False
        self.main_error: BaseException | None = None
        self._serving: dict[int, float] = {}

    def attach(self, generator: Any) -> None:
        """Note the ResponseGenerator that serves. A process has one."""
        self.generator = generator

    @property
    def uptime(self) -> float:
        """Seconds since the shim was loaded."""
        return time.monotonic() - self.started

    @property
    def stopping(self) -> bool:
        """Whether the server was asked to stop, by SIGINT or by stop_and_join."""
        return bool(getattr(self.generator, "_stop", False))

    @property
    def generation_thread(self) -> threading.Thread | None:
        return getattr(self.generator, "_generation_thread", None)

    @property
    def model_name(self) -> str:
        """What --model named, or "none"."""
        provider = getattr(self.generator, "model_provider", None)
        return str(getattr(getattr(provider, "cli_args", None), "model", None) or "none")

    @property
    def in_flight(self) -> int:
        """Requests whose handler has not finished answering."""
        return len(self._serving)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Around a handler's work on one request."""
        me = _own()
        self._serving[me] = time.monotonic()
        try:
            yield
        finally:
            self._serving.pop(me, None)


engine = Engine()


def is_generation_frame(code: Any) -> bool:
    """Whether `code` is the generation loop of mlx_lm/server.py, and no namesake in somebody else's server.py."""
    server = sys.modules.get("mlx_lm.server")
    return (
        server is not None
        and code.co_name in ("_generate", "_run_generate")
        and code.co_filename == getattr(server, "__file__", None)
    )
