from __future__ import annotations

import json

import pytest

from kit.bad_requests import CASES, TEXT
from shim.core.errors import ShimError
from shim.guards.bad_request import body, schema

# Only the loaded model, or the tokenizer's template, can tell these.
LATER = {
    "top_k of the vocabulary",
    "top_k above the vocabulary",
    "xtc_threshold 0.9",
    "part of an unknown type",
}
LATER |= {"logit_bias beyond the vocabulary", "logit_bias one beyond"}


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name not in LATER], ids=lambda case: case.name
)
def test_what_is_wrong_is_named(case):
    with pytest.raises(ShimError) as caught:
        schema.check(body.parse(case.raw), case.path != TEXT)
    assert (caught.value.status, caught.value.param) == (case.status, case.param)
    assert len(json.dumps(caught.value.body())) < 500, "an error must not repeat long input"
    json.dumps(caught.value.body()).encode()


GOOD = {
    "prompt": "x",
    "stream": False,
    "stream_options": {"include_usage": True},
    "model": "default_model",
    "draft_model": None,
    "adapters": None,
    "num_draft_tokens": 3,
    "max_completion_tokens": None,
    "max_tokens": 2**70,
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "repetition_context_size": 0,
    "presence_penalty": -2,
    "frequency_penalty": 2.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "logit_bias": {"0": -100, "256": 1.5},
    "logprobs": True,
    "top_logprobs": -1,
    "seed": 2**64 - 1,
    "chat_template_kwargs": {"enable_thinking": False, "truncation": False, "max_length": None},
    "stop": ["a", ""],
    "tools": [],
    "role_mapping": {"user": "U: "},
    "n": 1,
    "user": None,
    "metadata": {"deep": [[[{}]]]},
    "unknown": "\U0001f600",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_options", {}),
        ("stream_options", {"include_usage": None}),
        ("tools", None),
        ("tools", {}),
        ("stop", "x" * 2048),
    ],
)
def test_what_stock_takes_for_nothing_passes(name, value):
    schema.check({"prompt": "x", name: value}, chat=False)


@pytest.mark.parametrize("name", GOOD)
def test_what_stock_can_serve_passes(name):
    schema.check({"prompt": "x", name: GOOD[name]}, chat=False)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image_url", "image_url": {"url": "u"}},
                ],
            }
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            }
        ],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"}],
        [{"role": "assistant", "content": "", "tool_calls": None}],
        [{"role": "assistant", "content": "", "tool_calls": {}}],
    ],
)
def test_messages_of_every_kind_pass(messages):
    schema.check({"messages": messages}, chat=True)


def test_a_huge_value_is_not_repeated():
    for value in ("x" * 10**6, 10**4000, ["x"] * 10**5):
        with pytest.raises(ShimError) as caught:
            schema.check({"prompt": "x", "temperature": value}, chat=False)
        assert len(str(caught.value)) < 200


def test_ninety_levels_pass_and_a_hundred_do_not():
    def nested(levels):
        return json.loads("[" * levels + "]" * levels)

    body.parse(json.dumps({"tools": nested(90)}).encode())
    with pytest.raises(ShimError, match="nested too deep"):
        body.parse(json.dumps({"tools": nested(100)}).encode())
