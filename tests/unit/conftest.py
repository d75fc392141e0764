"""An engine of its own for each test, and requests in it."""

from __future__ import annotations

import pytest

from shim import engine as engine_module
from shim import ledger
from shim.engine import Engine
from shim.guards import stall


class Token:
    """Stands for the stock class Response."""


class Context:
    stopped = False

    def stop(self):
        self.stopped = True


@pytest.fixture
def engine(monkeypatch):
    fresh = Engine()
    for module in (engine_module, ledger, stall):
        monkeypatch.setattr(module, "engine", fresh)
    monkeypatch.setattr(ledger, "checks", [])
    monkeypatch.setattr(stall, "_suspects", {})
    monkeypatch.setattr(stall, "_paused", 0.0)
    return fresh


@pytest.fixture
def request_(engine):
    """Open a request: its entry and its queue."""

    def make():
        entry = engine.open(object(), object())
        return entry, ledger.ResponseQueue(entry, Token)

    return make


@pytest.fixture
def token():
    return Token


@pytest.fixture
def context():
    return Context


@pytest.fixture
def in_decode(request_):
    """Open a request and bring it past its prompt: its entry and its queue."""

    def make():
        entry, responses = request_()
        responses.put(Context())
        responses.put((1, 1))
        responses.put(Token())
        return entry, responses

    return make
