"""Which option of the command line an error is laid to."""

from __future__ import annotations

import types

import pytest

from shim.core import report
from shim.engine import fatal
from shim.engine.own_request import Answer
from shim.guards import unproven_model


def line(**given):
    return types.SimpleNamespace(
        **{"draft_model": None, "kv_bits": None, "kv_group_size": 64, "chat_template_args": {}}
        | given
    )


@pytest.mark.parametrize(
    ("given", "what", "option"),
    [
        ({}, "temperature must be at least 0", "--temp:"),
        ({}, "num_draft_tokens must be at least 0", "--num-draft-tokens:"),
        ({"draft_model": "d"}, "requires a trimmable prompt cache", "--draft-model d:"),
        ({"kv_bits": 8}, "RotatingKVCache Quantization NYI", "--kv-bits 8 --kv-group-size 64:"),
        ({}, "RotatingKVCache Quantization NYI", "--model none:"),
        ({"kv_bits": 8}, "no memory", "--model none, --kv-bits 8:"),
        ({"adapter_path": "a", "chat_template": ""}, "?", "--model none, --adapter-path a:"),
    ],
)
def test_an_error_is_laid_to_an_option(given, what, option):
    assert unproven_model._blamed(line(**given), what) == f"{option} {what}"


@pytest.mark.parametrize("ends", [False, True])
def test_a_refusal_is_said_unless_the_process_ends_anyway(ends, monkeypatch):
    said = []
    monkeypatch.setattr(report, "line", said.append)
    monkeypatch.setattr(fatal, "begun", lambda: ends)
    assert unproven_model._is_refused(Answer(503, "engine_dead", "why"))
    assert said == ([] if ends else ["the self-check was refused, and proves nothing: why"])
    assert not unproven_model._is_refused(Answer(400, "invalid_value", "why"))
