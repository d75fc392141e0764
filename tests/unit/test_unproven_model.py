"""Which option of the command line an error is laid to."""

from __future__ import annotations

import types

import pytest

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
