"""Requests that no server can serve, each with the error that it must get.

Tests, fuzzers and docs/bad-requests.md use these cases.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LARGE = 10**80
# Rows of the tiny model's embedding.
TINY_VOCABULARY = 257


@dataclass(frozen=True)
class Case:
    """A bad request. `kills`: the lines of mlx-lm whose stock server does not survive it."""

    name: str
    # An object for json.dumps, or bytes that are sent as they are.
    body: Any
    param: str | None = None
    path: str = TEXT
    status: int = 400
    kills: tuple[str, ...] = ()

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


BOTH = ("0.31.3", "0.32.2")
OLD, NEW = BOTH[:1], BOTH[1:]


def text(name: str, kills: tuple[str, ...] = (), param: str | None = "", **fields: Any) -> Case:
    """A completion with one wrong field, by default the last one given."""
    param = list(fields)[-1] if param == "" else param
    return Case(name, {"prompt": f"case {name}", "max_tokens": 3, **fields}, param, kills=kills)


def chat(name: str, messages: Any, param: str | None = "messages", **fields: Any) -> Case:
    return Case(name, {"messages": messages, "max_tokens": 3, **fields}, param, CHAT)


USER = [{"role": "user", "content": "hello"}]
HOT = {"temperature": 1.0}
KILLERS = [
    text("empty prompt", BOTH, prompt=""),
    text("list of prompts", BOTH, prompt=["a", "b"]),
    text("prompt of token ids", (), prompt=[1, 2]),
    text("prompt of a number", (), prompt=7),
    text("prompt null", (), prompt=None),
    text("prompt object", (), prompt={}),
    text("top_k of the vocabulary", BOTH, **HOT, top_k=TINY_VOCABULARY),
    text("top_k above the vocabulary", BOTH, **HOT, top_k=100_000),
    text("xtc_threshold 0.9", BOTH, **HOT, xtc_probability=0.5, xtc_threshold=0.9),
    text("stop holds a number", BOTH, stop=[1]),
    text("stop holds null", BOTH, stop=[None]),
    text("stop holds a list", BOTH, stop=[["a"]]),
    text("stop is a number", BOTH, stop=7),
    text("stop is an object", (), stop={"a": 1}),
    text("stop with half a surrogate", BOTH, stop=["\ud800"]),
    text("logit_bias beyond the vocabulary", BOTH, logit_bias={"999999": 1.0}),
    text("logit_bias one beyond", (), logit_bias={str(TINY_VOCABULARY): 1.0}),
    text("logit_bias far beyond", BOTH, logit_bias={"100000000000000": 1.0}),
    text("logit_bias of 2**70", BOTH, logit_bias={str(2**70): 1.0}),
    text("logit_bias negative", (), logit_bias={"-999999": 1.0}),
    text(
        "repetition_context_size 2**40", BOTH, repetition_penalty=1.1, repetition_context_size=2**40
    ),
    text("presence_context_size 2**80", BOTH, presence_penalty=1.0, presence_context_size=2**80),
    text("frequency_context_size 2**40", BOTH, frequency_penalty=1.0, frequency_context_size=2**40),
    text("min_p NaN", BOTH, **HOT, min_p=float("nan"), param=None),
    text("temperature NaN", (), temperature=float("nan"), param=None),
    text("temperature Infinity", (), temperature=float("inf"), param=None),
    text("temperature of 80 digits", BOTH, temperature=LARGE),
    Case("temperature 1e999", b'{"prompt": "t", "temperature": 1e999}', "temperature"),
]
OTHERS = [
    text("seed negative", (), seed=-1),
    text("seed of 2**64", (), seed=2**64),
    text("seed string", (), seed="1"),
    text("logit_bias null inside", (), logit_bias={"1": None}, param="logit_bias[1]"),
    text("logit_bias string inside", (), logit_bias={"1": "2"}, param="logit_bias[1]"),
    text("logit_bias list", (), logit_bias=[1]),
    text("logit_bias key of letters", (), logit_bias={"a": 1}),
    text("logit_bias infinite", (), logit_bias={"1": 1e39}, param="logit_bias[1]"),
    text("temperature string", (), temperature="0.5"),
    text("temperature negative", (), temperature=-1),
    text("temperature true", (), temperature=True),
    text("top_p above 1", (), top_p=1.5),
    text("top_k string", (), top_k="5"),
    text("top_k of 80 digits", BOTH, **HOT, top_k=LARGE),
    text("max_tokens string", (), max_tokens="5"),
    text("max_tokens negative", (), max_tokens=-1),
    text("max_tokens zero", (), max_tokens=0),
    text("max_tokens null", (), max_tokens=None),
    text("max_tokens of a fraction", (), max_tokens=1.5),
    text("max_completion_tokens string", (), max_completion_tokens="5"),
    text("num_draft_tokens negative", (), num_draft_tokens=-1),
    text("num_draft_tokens of 80 digits", (), num_draft_tokens=LARGE),
    text("repetition_penalty negative", (), repetition_penalty=-1.0),
    text("presence_penalty string", (), presence_penalty="1"),
    text("presence_penalty infinite", (), presence_penalty=1e39),
    text("frequency_penalty of 80 digits", BOTH, frequency_penalty=LARGE),
    text("repetition_context_size negative", (), repetition_context_size=-1),
    text("xtc_probability above 1", (), xtc_probability=2.0),
    text("logprobs number", (), logprobs=5),
    text("top_logprobs 12", (), top_logprobs=12),
    text("top_logprobs string", (), top_logprobs="3"),
    text("stream string", (), stream="true"),
    text("stream_options string", (), stream_options="usage"),
    text("stream_options list", (), stream_options=[]),
    text("num_draft_tokens 1000", (), num_draft_tokens=1000),
    text("repetition_penalty 1e-45", (), repetition_penalty=1e-45),
    text("frequency_penalty 1e30", (), frequency_penalty=1e30),
    text("logit_bias 1e30", (), logit_bias={"1": 1e30}, param="logit_bias[1]"),
    Case("two million lists", b'{"prompt": "x", "x": [' + b"[]," * 2_000_000 + b"[]]}"),
    Case("a key of 300,000 characters", {"prompt": "x", "k" * 300_000: "\ud800"}, "k" * 60),
    text(
        "include_usage string",
        (),
        stream_options={"include_usage": "yes"},
        param="stream_options.include_usage",
    ),
    text("model number", (), model=1),
    text("model null", (), model=None),
    text("draft_model list", (), draft_model=["a"]),
    text("adapters object", (), adapters={}),
    text("stop of 1000 strings", (), stop=["a"] * 1000),
    text("stop of 100,000 characters", (), stop="x" * 100_000),
    text("prompt with half a surrogate", (), prompt="\ud83d"),
    Case("no prompt", {"max_tokens": 3}, "prompt"),
    Case("no messages", {"max_tokens": 3}, "messages", CHAT),
    chat("messages empty", []),
    chat("messages null", None),
    chat("messages string", "hello"),
    chat("messages of strings", ["hello"], "messages[0]"),
    chat("message without role", [{"content": "x"}], "messages[0].role"),
    chat("role number", [{"role": 1, "content": "x"}], "messages[0].role"),
    chat("content number", [{"role": "user", "content": 1}], "messages[0].content"),
    chat("content of strings", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    chat(
        "part without text",
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text",
    ),
    chat("part of an unknown type", [{"role": "user", "content": [{"type": "audio"}]}], None),
    chat("tool_calls string", [{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    chat(
        "arguments no JSON",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "messages[0].tool_calls[0]",
    ),
    chat("content with half a surrogate", [{"role": "user", "content": "\udc00"}]),
    chat("tools string", USER, "tools", tools="x"),
    chat("tools of strings", USER, "tools[0]", tools=["x"]),
    chat("role_mapping list", USER, "role_mapping", role_mapping=["x"]),
    chat("chat_template_kwargs list", USER, "chat_template_kwargs", chat_template_kwargs=["x"]),
    chat(
        "template of the client",
        USER,
        "chat_template_kwargs",
        chat_template_kwargs={"chat_template": "x"},
    ),
    chat("tokenize false", USER, "chat_template_kwargs", chat_template_kwargs={"tokenize": False}),
    chat("return_dict", USER, "chat_template_kwargs", chat_template_kwargs={"return_dict": True}),
    Case("no JSON", b"{", None),
    Case("a list", b"[]", None),
    Case("a string", b'"x"', None),
    Case("nothing", b"", None),
    Case("not UTF-8", b'{"prompt": "\xff"}', None),
    Case("UTF-16", '{"prompt": "x"}'.encode("utf-16"), None),
    Case("a number of 5000 digits", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", None),
    Case("10,000 levels deep", b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", None),
    Case("500 levels deep", b'{"prompt": "x", "tools": ' + b"[" * 500 + b"]" * 500 + b"}", "tools"),
]
CASES = KILLERS + OTHERS
