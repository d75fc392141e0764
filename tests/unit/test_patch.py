from __future__ import annotations

import types

import pytest

from shim.core import patch, report, verdicts


@pytest.fixture(params=["wrapt", "standard library"])
def wrap(request, monkeypatch):
    """patch.wrap, with wrapt and without it."""
    if request.param == "standard library":
        monkeypatch.setattr(patch, "wrapt", None)
    return patch.wrap


class Server:
    def method(self, n):
        return ("method", n)


def test_wrap_is_the_same_with_and_without_wrapt(wrap):
    module = types.ModuleType("module")
    module.Server = type("Server", (Server,), {"method": Server.method})
    module.function = lambda n: ("function", n)
    seen = []

    def wrapper(wrapped, instance, args, kwargs):
        seen.append((type(instance).__name__, args, kwargs))
        return wrapped(*args, **kwargs)

    wrap(module, "Server.method", wrapper)
    wrap(module, "function", wrapper)
    assert module.Server().method(1) == ("method", 1)
    assert module.Server().method(n=2) == ("method", 2)
    assert module.function(3) == ("function", 3)
    assert seen == [("Server", (1,), {}), ("Server", (), {"n": 2}), ("NoneType", (3,), {})]
    with pytest.raises(verdicts.Incompatible, match=r"module has no Server.missing"):
        wrap(module, "Server.missing", wrapper)


def test_what_runs_after_a_call_never_reaches_the_caller(monkeypatch):
    said, calls = [], []
    monkeypatch.setattr(report, "line", said.append)

    def note(instance, args, kwargs, result):
        calls.append((args, result))
        raise KeyError("changed upstream")

    wrapper = patch.after(note)
    for n in (1, 2):
        assert wrapper(lambda n: n + 1, None, (n,), {}) == n + 1
    assert calls == [((1,), 2)], "once broken, it is no longer called"
    assert len(said) == 1
    assert "KeyError('changed upstream')" in said[0]


class Refusing(types.ModuleType):
    """A module of stock with a class that inherits a function."""

    def __init__(self):
        super().__init__("stock")
        self.Base = type("Base", (), {"inherited": lambda self: "inherited"})
        self.Server = type("Server", (self.Base,), {"own": lambda self: "own"})
        self.function = lambda: "function"


@pytest.mark.parametrize("error", [RuntimeError("half-way"), verdicts.Incompatible("half-way")])
def test_what_was_wrapped_before_an_error_is_unwrapped(wrap, monkeypatch, error):
    monkeypatch.setattr(patch, "layers", {})
    stock = Refusing()
    before = [dict(vars(thing)) for thing in (stock, stock.Server)]
    with pytest.raises(type(error)), patch.undo_on_error():
        for path in ("Server.own", "Server.inherited", "function", "function"):
            wrap(stock, path, lambda *_: "wrapped")
        assert stock.function() == stock.Server().inherited() == "wrapped"
        raise error
    assert [dict(vars(thing)) for thing in (stock, stock.Server)] == before
    assert stock.Server().inherited() == "inherited"
    assert not any(patch.layers.values())


def test_what_a_refusal_has_closed_stays_closed(wrap):
    stock = Refusing()
    with pytest.raises(verdicts.Refused), patch.undo_on_error():
        wrap(stock, "Server.own", lambda *_: "closed")
        raise verdicts.Refused("no key")
    assert stock.Server().own() == "closed"


def test_an_argument_is_found_by_its_name_and_where_the_signature_has_it():
    def stock(extra, request, timeout=None):
        raise AssertionError("it is not called")

    assert patch.given(stock, ("e", "r"), {}, "request", 0) == "r", (
        "not the first: the signature tells"
    )
    assert patch.given(stock, ("e",), {"request": "r"}, "request", 0) == "r"
    assert patch.given(stock, ("e", "r"), {}, "timeout", 0) is None
    assert patch.given(len, ("r",), {}, "unknown", 0) == "r", (
        "without a signature, the position tells"
    )


def test_a_generator_function_is_not_wrapped(wrap):
    stock = Refusing()

    def lazy(self):
        yield 1

    stock.Server.lazy = lazy
    with pytest.raises(verdicts.Incompatible, match="is a generator"):
        wrap(stock, "Server.lazy", lambda *_: None)
    assert not patch.try_wrap(stock, "Server.lazy", lambda *_: None)
