"""Whether a token comes: anybody's, and the probe's own only where nobody is served."""

from __future__ import annotations

import types

import pytest

from shim.engine import generation_probe


@pytest.fixture
def ask(engine, monkeypatch):
    """Ask, with `meanwhile()` called at each look."""

    def asked(meanwhile, seconds=20.0):
        event = types.SimpleNamespace(wait=lambda _: meanwhile())
        fake = types.SimpleNamespace(Event=lambda: event)
        monkeypatch.setattr(generation_probe, "engine", engine)
        monkeypatch.setattr(generation_probe, "threading", fake)
        return generation_probe.ask(None, seconds)

    return asked


def test_while_clients_are_served_it_asks_for_nothing(ask, in_decode, token):
    _, responses = in_decode()
    assert ask(lambda: responses.put(token())) == ("ok", "", "requests")


def test_the_token_of_a_request_that_came_later_is_one(ask, in_decode):
    in_decode()
    assert ask(in_decode).by == "requests"


def test_silence_beside_one_in_decode(ask, in_decode):
    in_decode()
    told = ask(lambda: None, 0.01)
    assert told.status == "no_token"
    assert "requests in the engine: 1, past their prompt: 1" in told.reason


def test_silence_beside_a_prompt_proves_nothing(ask, in_decode, request_, context):
    in_decode()
    _, responses = request_()
    responses.put(context())
    assert ask(lambda: None, 0.01).status == "busy"


def test_what_is_known_is_told_at_once(ask, engine):
    engine.booting = True
    assert ask(lambda: None).status == "loading"
