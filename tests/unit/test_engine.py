"""The condition of the engine, which is the first true word of a list, and its age."""

from __future__ import annotations

import time
import types

from shim.core import errors
from shim.engine.state import Engine, Hold


def test_the_condition():
    """The test sets one after another. Each outweighs those before it."""
    engine = Engine()
    assert engine.condition == "ok"
    engine.booting = True
    assert engine.condition == "loading"
    engine.booting, engine.loading = False, 1
    assert engine.condition == "loading"
    engine.start_wait = Hold("2 deaths", time.monotonic() + 60)
    assert engine.condition == "breaker"
    engine.stalled = "stalled: request 1"
    assert engine.condition == "stalled"
    engine.final_error = errors.engine_dead()
    assert engine.condition == "dead"
    engine.draining = True
    assert engine.condition == "draining"


def test_a_generation_that_is_over_and_a_stop():
    engine = Engine()
    engine.generator = types.SimpleNamespace(_generation_failed=True, _stop=False)
    assert engine.condition == "dead"
    engine.generator._stop = True
    assert engine.condition == "draining"


def test_the_age_does_not_begin_before_it_is_up():
    engine = Engine()
    engine.started -= 3600
    assert engine.age == 0
    engine.up_since = time.monotonic() - 5
    assert 5 <= engine.age < 60
