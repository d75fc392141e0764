"""A handler waits for ever on the queue of its response: for an engine that is dead, or without any limit at all.

mlx-lm 0.31.3 waits without a timeout; 0.32 wakes once a second but only asks whether the generation thread lives. Here
a waiter also looks at what the shim knows, at least once a second: it ends when the engine is dead or dying, and at
MLX_SHIM_REQUEST_TIMEOUT, which stops that request alone. New requests are not let into a dead engine, and an orderly
stop leaves nobody without a word.
"""

from __future__ import annotations

import time
from typing import Any

from .. import errors, ledger, patch, settings
from ..engine import Entry, engine
from . import require

UPSTREAM = "mlx-lm 1505, 1598, 1834"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(server, "ResponseGenerator.generate", "ResponseGenerator.stop_and_join", "Queue", "Response")


def apply(server: Any) -> None:
    ledger.checks.append(_check)
    patch.wrap(server, "ResponseGenerator.generate", _admit)
    patch.wrap(server, "ResponseGenerator.stop_and_join", _stop_and_join)


def _check(entry: Entry) -> None:
    if engine.ending is not None:
        raise engine.ending
    if engine.generation_is_over:
        raise errors.shutting_down() if engine.stopping else errors.engine_dead()
    limit = settings.current.request_timeout
    if limit and time.monotonic() - entry.opened > limit:
        entry.outcome = "timed_out"
        raise errors.request_timeout(limit)


def _admit(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if engine.ending is not None:
        raise engine.ending
    if engine.generation_is_over:
        raise errors.shutting_down() if engine.stopping else errors.engine_dead()
    if settings.current.while_loading == "reject" and (engine.loading or engine.booting):
        raise errors.model_loading()
    return wrapped(*args, **kwargs)


def _stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """After the orderly stop nothing more is generated: those who still wait are told before the process ends."""
    result = wrapped(*args, **kwargs)
    if instance is engine.generator:
        engine.fail_waiting(errors.shutting_down())
        engine.wait_for_handlers(settings.current.exit_grace)
    return result
