"""A fresh engine for each test, and requests in it; names and addresses; `python -m shim`."""

from __future__ import annotations

import os
import socket
import types

import pytest

from shim.cli import unit
from shim.core import memory, report
from shim.core.memory import Usage
from shim.engine import drain, facts, queues
from shim.engine import state as engine_module
from shim.engine.state import Engine
from shim.guards import exhausted_memory, stall
from shim.guards.exhausted_memory import hard as hard_module
from shim.guards.exhausted_memory import limit, trim
from shim.guards.exhausted_memory import soft as soft_module
from shim.guards.request_forgery import image_fetch

_MIB = 2**20


class Token:
    """Stands for the stock class Response."""


class Context:
    stopped = False

    def stop(self):
        self.stopped = True


@pytest.fixture
def engine(monkeypatch):
    fresh = Engine()
    for module in (engine_module, queues, stall):
        monkeypatch.setattr(module, "engine", fresh)
    monkeypatch.setattr(queues, "checks", [])
    monkeypatch.setattr(queues, "admissions", [])
    # Every fact can be seen.
    for fact in facts.known.values():
        monkeypatch.setattr(fact, "lost", None)
    monkeypatch.setattr(stall, "_suspects", {})
    monkeypatch.setattr(stall, "_paused", 0.0)
    return fresh


@pytest.fixture
def request_(engine):
    """Open a request. Returns its entry and its queue."""

    def make():
        entry = engine.open((object(),), object())
        return entry, queues.ResponseQueue(entry, Token)

    return make


@pytest.fixture
def token():
    return Token


@pytest.fixture
def context():
    return Context


@pytest.fixture
def in_decode(request_):
    """Open a request and bring it past its prompt. Returns its entry and its queue."""

    def make():
        entry, responses = request_()
        responses.put(Context())
        responses.put((1, 1))
        responses.put(Token())
        return entry, responses

    return make


@pytest.fixture
def names(monkeypatch):
    """{name: a list of addresses for each look-up, then the last again}; and small limits."""
    stock = socket.getaddrinfo
    told: dict[str, list[list]] = {}

    def resolve(host, port, *args, **kwargs):
        if host not in told:
            numeric = 0 if host == "localhost" else socket.AI_NUMERICHOST
            return stock(host, port, *args, **kwargs, flags=numeric)
        answers = told[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            (
                socket.AF_INET6 if ":" in a else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                sockaddr(a, port),
            )
            for a in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(image_fetch, "MAX_BYTES", 2**20)
    return told


def sockaddr(address, port):
    """An address may name another port, "127.0.0.1@80", which then stands for another machine."""
    address, _, own = address.partition("@")
    return (address, int(own or port), 0, 0) if ":" in address else (address, int(own or port))


@pytest.fixture
def one_public(monkeypatch, names):
    """Only 127.0.0.1 counts as a public address, so that a test can play a public server."""
    monkeypatch.setattr(image_fetch, "is_public", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(image_fetch, "_is_own", lambda *_: False)


@pytest.fixture
def lines(monkeypatch):
    """The lines that the shim says, without the prefix."""
    said: list[str] = []
    monkeypatch.setattr(report, "line", said.append)
    monkeypatch.setattr(report, "_said", set())
    return said


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "a model"
    folder.mkdir()
    return str(folder)


@pytest.fixture
def shim(capsys, monkeypatch):
    """Run `python -m shim UNIT ARGUMENTS` in this process, without the settings of this shell.

    Returns (status, stdout, stderr).
    """
    for name in list(os.environ):
        if name.startswith(("MLX_SHIM", "HF_")):
            monkeypatch.delenv(name)

    def run(kind, *arguments):
        try:
            status = unit.main(kind, [str(word) for word in arguments])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def guard(engine, lines, monkeypatch):
    """A guard with soft 800 and hard 1000 MiB.

    `look(mib)` makes it look a second later. `.orders` are its orders to the drain.
    """
    for module in (exhausted_memory, soft_module, hard_module, limit, trim):
        monkeypatch.setattr(module, "engine", engine)
    clock, orders, critical = [1000.0], [], [False]
    monkeypatch.setattr(exhausted_memory, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(memory, "give_back", lambda: None)
    monkeypatch.setattr(memory, "is_critical", lambda: critical[0])
    monkeypatch.setattr(drain, "ask", orders.append)

    def make(soft=800, hard=1000, begin=200):
        made = exhausted_memory._Guard(
            types.SimpleNamespace(clear_cache=lambda: None), soft * _MIB, hard * _MIB
        )
        now = [begin]
        monkeypatch.setattr(
            memory, "usage", lambda mx: Usage((now[0] - 50) * _MIB, 10 * _MIB, now[0] * _MIB)
        )
        made.next_request(lambda: None, None, (), {})

        def look(figure, seconds=1.0, macos=False):
            now[0], critical[0] = figure, macos
            clock[0] += seconds
            made()
            return made

        return types.SimpleNamespace(look=look, guard=made, orders=orders, lines=lines)

    return make
