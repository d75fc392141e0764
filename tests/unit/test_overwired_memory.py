"""How much mlx_lm may wire: at most what the setting allows for any loaded model."""

from __future__ import annotations

import types

import mlx.core as mx
import pytest
from mlx import nn

from shim.core import memory, settings
from shim.core.settings import Settings
from shim.core.values import AUTO_MARGIN, parse_wired
from shim.engine.state import Engine
from shim.guards import overwired_memory

ASKED = 64 << 30
BYTES = 8 * 8 * 4


class Odd:
    """A program's own model, which is not an nn.Module."""


@pytest.mark.parametrize(
    ("policy", "model", "total", "allowed"),
    [
        ("stock", nn.Linear, 100, ASKED),
        ("off", nn.Linear, 100, 0),
        ("12G", nn.Linear, 100, 12 << 30),
        ("5000T", nn.Linear, 100, ASKED),
        ("model+1K", nn.Linear, 100, BYTES + 1024),
        ("model+1K", None, 100, 0),
        ("model+1K", Odd, 100, 0),
        ("auto", nn.Linear, 2 * BYTES, 0),
        ("auto", nn.Linear, BYTES, BYTES + AUTO_MARGIN),
        ("auto", Odd, 100, 0),
    ],
)
def test_what_is_allowed(monkeypatch, policy, model, total, allowed):
    engine = Engine()
    made = None if model is None else model(8, 8, bias=False) if model is nn.Linear else model()
    engine.generator = types.SimpleNamespace(
        model_provider=types.SimpleNamespace(model=made, draft_model=None)
    )
    monkeypatch.setattr(overwired_memory, "engine", engine)
    monkeypatch.setattr(memory, "total", lambda: total)
    monkeypatch.setattr(settings, "current", Settings(wired=parse_wired(policy)))
    asked = []
    stock = types.SimpleNamespace(
        array=mx.array, set_wired_limit=lambda limit: asked.append(limit) or 5
    )
    assert overwired_memory._View(stock).set_wired_limit(ASKED) == 5
    assert asked == [allowed]
