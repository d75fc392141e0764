"""What a completion request may say: the schema of its body, checked before the stock server acts on any of it.

It refuses what the stock server refuses, and what it accepts and then fails on, often for everybody (mlx-lm 1505's
comments; T3, T8 to T15 in the project's list of failure modes). What passes keeps its stock meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ...core.errors import invalid
from .body import describe_value

STOPS, STOP_LENGTH = (
    64,
    2048,
)  # stop strings, and characters in all: stock builds two automata of them, and keeps 100
DRAFTS = 64  # tokens guessed at a time: until they are, nobody else has a turn
LARGEST = 3.4e38  # what still is a finite float32
WEIGHT = (
    1e4  # of a penalty or a bias; with much more the log-probabilities are no numbers, and no JSON
)
INT32, UINT64 = 2**31 - 1, 2**64 - 1
# chat_template_kwargs reach apply_chat_template as keywords: these are not variables of the template but change what
# the call does or returns, and a template of the client's own can run for ever in the generation thread.
RESERVED = {
    "chat_template", "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "tokenizer_kwargs", "truncation",
}  # fmt: skip
GIVEN_BY_STOCK = {"add_generation_prompt", "conversation", "tokenize", "tools"}  # twice is an error

Check = Callable[[str, Any], None]


def check(body: dict[str, Any], chat: bool) -> None:
    """Raise ShimError 400 for the first field that is not as accepted; `chat` where the path is a chat's."""
    for name, test in _FIELDS.items():
        if name in body:
            test(name, body[name])
    if chat:
        _messages(body)
    elif "prompt" not in body:
        raise invalid("prompt", "the request has no prompt", "missing_required_parameter")
    else:
        _prompt("prompt", body["prompt"])


def _whole(low: int, high: int | None = None, *, null: bool = False) -> Check:
    accepted = (
        f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}"
    )

    def test(name: str, value: Any) -> None:
        fits = type(value) is int and low <= value and (high is None or value <= high)
        if not fits and not (null and value is None):
            raise invalid(
                name,
                f"{name} is {describe_value(value)}; accepted: {accepted}{', or null' if null else ''}",
            )

    return test


def _number(low: float, high: float = LARGEST, *, point: bool = False) -> Check:
    """A finite number; with `point`, as stock has it, one that is written with a decimal point."""
    accepted = f"a number, {low:g} or more"
    accepted = accepted if high == LARGEST else f"a number from {low:g} to {high:g}"
    accepted += ", written with a decimal point" if point else ""

    def test(name: str, value: Any) -> None:
        fits = type(value) is float or (type(value) is int and not point)
        if (
            not fits
            or (isinstance(value, float) and not math.isfinite(value))
            or not low <= value <= high
        ):
            raise invalid(name, f"{name} is {describe_value(value)}; accepted: {accepted}")

    return test


def _typed(accepted: str, *types: type) -> Check:
    def test(name: str, value: Any) -> None:
        if type(value) not in types:
            raise invalid(name, f"{name} is {describe_value(value)}; accepted: {accepted}")

    return test


def _stop(name: str, value: Any) -> None:
    accepted = f"a string or a list of at most {STOPS} strings, {STOP_LENGTH} characters in all"
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list):
        raise invalid(name, f"stop is {describe_value(value)}; accepted: {accepted}")
    if len(stops) > STOPS:
        raise invalid(name, f"stop is a list of {len(stops)}; accepted: {accepted}")
    for stop in stops:
        if not isinstance(stop, str):
            raise invalid(name, f"stop holds {describe_value(stop)}; accepted: {accepted}")
    length = sum(map(len, stops))
    if length > STOP_LENGTH:
        raise invalid(name, f"stop has {length} characters; accepted: {accepted}")


def _repetition_penalty(name: str, value: Any) -> None:
    """Logits are divided by it; 0 is none."""
    _number(0, WEIGHT)(name, value)
    if 0 < value < 1 / WEIGHT:
        raise invalid(
            name,
            f"{name} is {describe_value(value)}; accepted: 0, or a number from {1 / WEIGHT:g} to {WEIGHT:g}",
        )


def _logit_bias(name: str, value: Any) -> None:
    """Whether the ids are the model's is seen later, where the model is at hand."""
    accepted = "an object of token ids and numbers, or null"
    if value is None:
        return
    if not isinstance(value, dict):
        raise invalid(name, f"logit_bias is {describe_value(value)}; accepted: {accepted}")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 11):  # noqa: PLR2004
            raise invalid(
                name, f"logit_bias has the key {json.dumps(key[:40])}; accepted: {accepted}"
            )
        _weight(f"logit_bias[{key}]", bias)


def _stream_options(name: str, value: Any) -> None:
    _typed("an object or null", dict, type(None))(name, value)
    if value and "include_usage" in value:
        usage = value["include_usage"]
        _typed("true, false or null", bool, type(None))("stream_options.include_usage", usage)


def _tools(name: str, value: Any) -> None:
    if value == {}:  # none, to stock
        return
    _typed("a list of objects, or null", list, type(None))(name, value)
    for index, tool in enumerate(value or []):
        _typed("an object", dict)(f"{name}[{index}]", tool)


def _role_mapping(name: str, value: Any) -> None:
    _typed("an object of strings, or null", dict, type(None))(name, value)
    for role, text in (value or {}).items():
        _typed("a string", str)(f"role_mapping.{role[:40]}", text)


def _chat_template_kwargs(name: str, value: Any) -> None:
    _typed("an object or null", dict, type(None))(name, value)
    for key in value or {}:
        if key in GIVEN_BY_STOCK or (key in RESERVED and value[key] not in (None, False)):
            raise invalid(
                name, f"chat_template_kwargs has {key}; accepted: variables of the model's template"
            )


def _prompt(name: str, value: Any) -> None:
    if isinstance(value, list):
        raise invalid(
            name,
            "prompt is a list, which mlx_lm.server does not take; accepted: one string a request",
        )
    _typed("a string that is not empty", str)(name, value)
    if not value:
        raise invalid(name, "prompt is empty; accepted: a string that is not empty")


def _messages(body: dict[str, Any]) -> None:
    accepted = "a list of at least one object with role and content"
    if "messages" not in body:
        raise invalid("messages", "the request has no messages", "missing_required_parameter")
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        given = "an empty list" if messages == [] else describe_value(messages)
        raise invalid("messages", f"messages is {given}; accepted: {accepted}")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _typed("an object with role and content", dict)(where, message)
        _typed("a string", str)(f"{where}.role", message.get("role"))
        _content(f"{where}.content", message.get("content"))
        _tool_calls(f"{where}.tool_calls", message.get("tool_calls"))


def _content(where: str, content: Any) -> None:
    _typed("a string, a list of parts, or null", str, list, type(None))(where, content)
    for index, part in enumerate(content if isinstance(content, list) else []):
        here = f"{where}[{index}]"
        _typed("an object", dict)(here, part)
        _typed("a string", str)(f"{here}.type", part.get("type"))
        if part["type"] == "text":
            _typed("a string", str)(f"{here}.text", part.get("text"))


def _tool_calls(where: str, calls: Any) -> None:
    """`arguments` is JSON in a string, as in OpenAI's API, or an object."""
    if not calls:  # none, to stock, whatever it is
        return
    _typed("a list of objects, or null", list)(where, calls)
    for index, call in enumerate(calls):
        here = f"{where}[{index}]"
        _typed("an object", dict)(here, call)
        _typed("an object or null", dict, type(None))(f"{here}.function", call.get("function"))
        arguments = (call.get("function") or {}).get("arguments")
        if isinstance(arguments, str) and arguments:
            try:
                json.loads(arguments)
            except (ValueError, RecursionError):
                raise invalid(
                    here, f"{here}.function.arguments is not JSON; accepted: JSON in a string"
                ) from None


_weight = _number(-WEIGHT, WEIGHT)
_switch = _typed("true or false", bool)
_name = _typed("a string", str)
_name_or_none = _typed("a string or null", str, type(None))
_context_size = _whole(0, INT32)
_FIELDS: dict[str, Check] = {
    "stream": _switch,
    "stream_options": _stream_options,
    "model": _name,
    "draft_model": _name_or_none,
    "adapters": _name_or_none,
    "num_draft_tokens": _whole(0, DRAFTS),
    "max_completion_tokens": _whole(1, null=True),
    "max_tokens": _whole(1),
    "temperature": _number(0),
    "top_p": _number(0, 1),
    "top_k": _whole(0, INT32),
    "min_p": _number(0, 1),
    "repetition_penalty": _repetition_penalty,
    "repetition_context_size": _context_size,
    "presence_penalty": _weight,
    "presence_context_size": _context_size,
    "frequency_penalty": _weight,
    "frequency_context_size": _context_size,
    "xtc_probability": _number(0, 1, point=True),
    "xtc_threshold": _number(0, 1, point=True),
    "logit_bias": _logit_bias,
    "logprobs": _switch,
    "top_logprobs": _whole(-1, 11),
    "seed": _whole(0, UINT64, null=True),
    "chat_template_kwargs": _chat_template_kwargs,
    "stop": _stop,
    "tools": _tools,
    "role_mapping": _role_mapping,
}
