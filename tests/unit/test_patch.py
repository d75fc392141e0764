from __future__ import annotations

import types

import pytest

from shim import patch, report, verdicts


@pytest.fixture(params=["wrapt", "standard library"])
def wrap(request, monkeypatch):
    """patch.wrap as it is with wrapt, and as it is without."""
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
    assert calls == [((1,), 2)], "once broken it is left out"
    assert len(said) == 1
    assert "KeyError('changed upstream')" in said[0]
