"""A handler waits forever for its response: on a dead engine, or with no time limit.

mlx-lm 0.31.3 waits without a timeout. 0.32 wakes once a second, but asks only whether the
generation thread lives. Here a waiting handler also asks the shim, at least once a second. Its
wait ends when the engine is dead or dying. It also ends at MLX_SHIM_REQUEST_TIMEOUT, which stops
that request alone.

A dead engine takes no new requests. After an orderly stop every client that still waits gets an
error.
"""

from __future__ import annotations

import time
from typing import Any

from ..core import errors, patch, settings
from ..core.verdicts import Incompatible
from ..engine import facts, queues, trial
from ..engine.entries import Entry
from ..engine.state import engine

UPSTREAM = "mlx-lm 1505, 1598, 1834"
MODULE = "mlx_lm.server"
LIVES_BY = {
    "deliveries": facts.NEEDED,
    "stops": "after an orderly stop a client that still waits is told within a second, or cut off",
    "loads": "MLX_SHIM_WHILE_LOADING=reject refuses no request",
}


def probe(server: Any) -> None:
    """Have a copy of stock's `generate` wait, and tell it that the engine is dead."""
    if not trial.is_told(server, errors.engine_dead()):
        raise Incompatible("in a trial a handler that waited was not told")


def apply(server: Any) -> None:
    queues.checks.append(_check)
    queues.admissions.append(_refuse)
    # Outside the guards that check the models a request names: a request that is refused must not
    # have a model downloaded first.
    patch.try_wrap(server, "ResponseGenerator.generate", _generate)
    patch.try_wrap(server, "ResponseGenerator.stop_and_join", _stop_and_join)


def _check(entry: Entry) -> None:
    _refuse_if_over()
    limit = settings.current.request_timeout
    if limit and time.monotonic() - entry.opened > limit:
        entry.outcome = "timed_out"
        raise errors.request_timeout(limit)


def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if instance is engine.generator:
        _refuse()
    return wrapped(*args, **kwargs)


def _refuse() -> None:
    """Before a request is handed to the engine."""
    _refuse_if_over()
    loading = engine.loading or engine.is_starting
    if settings.current.while_loading == "reject" and loading and engine.own is None:
        raise errors.model_loading()


def _refuse_if_over() -> None:
    if engine.final_error is not None:
        raise engine.final_error
    if engine.generation_is_over:
        raise errors.shutting_down() if engine.stopping else errors.engine_dead()


def _stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """After an orderly stop nothing is generated any more: tell the clients that still wait."""
    result = wrapped(*args, **kwargs)
    if instance is engine.generator:
        engine.fail_waiting(errors.shutting_down())
        engine.wait_for_handlers(settings.current.exit_grace)
    return result
