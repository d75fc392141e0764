"""Which prompts are refused. A token takes 100 bytes, hard is 10,000, the model takes 2,000."""

from __future__ import annotations

import types

import pytest

from shim.core import memory, settings
from shim.core.errors import ShimError
from shim.core.memory import Usage
from shim.engine.entries import DECODE
from shim.guards import unaffordable_prompt
from shim.models.kv_cost import Cost, Layer

PER_TOKEN = Cost((Layer(100, float("inf"), 1, 0),))


class Weight:
    """Stands for an array of MLX."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


class Machine:
    """The figures of MLX, a prompt cache, and the guard."""

    def __init__(self, engine):
        self.active, self.cached, self.trimmed = 2000, 0, []
        mx = types.SimpleNamespace(get_active_memory=lambda: self.active, array=Weight)
        self.guard = unaffordable_prompt._Guard(mx)
        self.guard._cost, self.guard._overhead = PER_TOKEN, 0
        self.engine = engine
        machine = self

        class Entries:
            @property
            def nbytes(self):
                return machine.cached

            def trim_to(self, n_bytes):
                machine.trimmed.append(n_bytes)

        provider = types.SimpleNamespace(cli_args=types.SimpleNamespace(kv_bits=None))
        self.generator = engine.generator = types.SimpleNamespace(
            prompt_cache=Entries(), model_provider=provider
        )

    def ask(self, tokens):
        return self.guard.tokenize(lambda: ([0] * tokens, "more"), self.generator, (), {})

    def refused(self, tokens):
        with pytest.raises(ShimError) as caught:
            self.ask(tokens)
        return caught.value.status, str(caught.value)


@pytest.fixture
def machine(engine, monkeypatch, lines):
    monkeypatch.setattr(unaffordable_prompt, "engine", engine)
    monkeypatch.setattr(settings, "current", types.SimpleNamespace(memory_hard=10_000))
    return Machine(engine)


def test_what_fits_alone(machine):
    assert machine.ask(80)[1] == "more"
    status, message = machine.refused(81)
    assert status == 400
    assert "has 81 tokens" in message
    assert "accepted: 80" in message


def test_before_the_first_nothing_is_assumed(machine):
    machine.guard._cost = None
    assert machine.ask(10**6)
    machine.guard._cost = PER_TOKEN
    machine.guard.forget(lambda: None, None, (), {})
    assert machine.ask(10**6), "another model is loaded"


def test_beside_others_it_is_503_and_by_the_longest_of_the_batch(machine, request_, engine):
    entry, _ = request_()
    entry.phase, entry.prompt, entry.tokens = DECODE, 30, 9
    machine.active = 2000 + 3900
    engine.batch = lambda: types.SimpleNamespace(prompt_cache_nbytes=3900)
    assert machine.ask(1), "39 tokens twice"
    assert machine.ask(40), "40 twice"
    status, message = machine.refused(41)
    assert (status, message) == (503, "the server is short of memory")
    entry.tokens = 11
    assert machine.refused(1)[0] == 503
    entry.stopped = True
    assert machine.ask(41)


def test_what_is_in_use_for_the_moment_is_no_verdict_for_ever(machine, request_):
    """Caches that wait for their turn are counted nowhere. They can only cause a 503."""
    entry, _ = request_()
    entry.phase, entry.prompt = DECODE, 1
    machine.ask(1)
    machine.active = 9000
    assert machine.refused(50)[0] == 503


def test_caches_that_share_their_arrays_do_not_make_the_model_smaller(machine, engine):
    """Two queued requests continue one entry of the prompt cache. Each counts with all of it."""
    model = types.SimpleNamespace(
        parameters=lambda: {"layers": [{"w": Weight(1200)}, {"w": Weight(700)}]}
    )
    machine.generator.model_provider.model = model
    machine.active, machine.cached = 2000 + 1900, 1900
    engine.batch = lambda: types.SimpleNamespace(prompt_cache_nbytes=2 * 1900)
    machine.ask(1)
    machine.cached, machine.active, engine.batch = 0, 2000, lambda: None
    assert machine.ask(81), "100 bytes besides the weights were not seen: only the weights tell"
    assert machine.refused(82)[1].endswith("accepted: 81 (MLX_SHIM_MEMORY_HARD)")


def test_the_prompt_cache_makes_room(machine):
    machine.active, machine.cached = 2000 + 7000, 7000
    machine.ask(60)
    assert machine.trimmed == [2000]


def test_a_limit_below_the_model_refuses_nobody(machine):
    machine.active = 10_000
    assert machine.ask(10**6)


def test_a_limit_that_is_left_out_refuses_nobody(machine, engine):
    """exhausted_memory leaves it out, because it is hardly above the model, and says so."""
    machine.active = 9_700
    assert machine.refused(81)[0] == 400
    engine.ignored_limits.add("memory_soft")
    assert machine.refused(81)[0] == 400
    engine.ignored_limits.add("memory_hard")
    assert machine.ask(81)


def test_what_goes_wrong_here_refuses_nobody(machine, lines):
    machine.generator = machine.engine.generator = types.SimpleNamespace()
    assert machine.ask(10**6)
    assert machine.ask(10**6)
    assert len(lines) == 1
    assert "the memory that a prompt would take is not known" in lines[0]


def test_the_overhead_is_what_mlx_does_not_count(machine, monkeypatch):
    monkeypatch.setattr(memory, "give_back", lambda: None)
    monkeypatch.setattr(memory, "usage", lambda mx: Usage(1000, 500, 4500))
    machine.guard._overhead = None
    machine.guard.learn(lambda *a: None, machine.generator.prompt_cache, ("model", [1], []), {})
    machine.guard._cost = PER_TOKEN
    assert machine.ask(50)
    assert machine.refused(51)[0] == 400
