"""The schema of a completion request: each field is checked before stock acts on any of them.

It refuses what stock refuses. It also refuses what stock accepts and then fails on, often for all
requests at once: the comments of mlx-lm 1505, and docs/bad-requests.md, list what was seen. A
body that passes keeps its meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ...core.errors import invalid
from .body import describe_value

# Stop strings of a request, and characters in all of them. Stock builds two automata of them, and
# keeps those of 100 requests.
MOST_STOPS = 64
MOST_STOP_CHARACTERS = 2048
# Tokens that a draft model guesses at a time: other requests wait until it has guessed them.
MOST_DRAFT_TOKENS = 64
# The largest number that is still a finite float32.
LARGEST_FLOAT = 3.4e38
# The largest penalty or bias. With a much larger one the log-probabilities become NaN, which JSON
# does not have.
LARGEST_WEIGHT = 1e4
LARGEST_INT32, LARGEST_UINT64 = 2**31 - 1, 2**64 - 1
# Digits of a token id in logit_bias.
MOST_ID_DIGITS = 10
# Characters of a key that an error repeats.
_SHOWN_LENGTH = 40
# Stock passes chat_template_kwargs to apply_chat_template as keywords. These keywords are not
# variables of the template: they change what the call does or returns. A template that a client
# sends can run forever in the generation thread.
RESERVED_KEYWORDS = {
    "chat_template",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenizer_kwargs",
    "truncation",
}
# Stock passes these itself, and Python refuses a keyword that is given twice.
KEYWORDS_OF_STOCK = {"add_generation_prompt", "conversation", "tokenize", "tools"}

Check = Callable[[str, Any], None]


def check(body: dict[str, Any], chat: bool) -> None:
    """Raise ShimError 400 for the first field that is not accepted; `chat`: a chat's path."""
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
    bounds = f", {low} or more" if high is None else f" from {low} to {high}"
    accepted = f"a whole number{bounds}{', or null' if null else ''}"

    def test(name: str, value: Any) -> None:
        fits = type(value) is int and low <= value and (high is None or value <= high)
        if not fits and not (null and value is None):
            raise invalid(name, f"{name} is {describe_value(value)}; accepted: {accepted}")

    return test


def _number(low: float, high: float = LARGEST_FLOAT, *, point: bool = False) -> Check:
    """A finite number; with `point`, as stock wants it, one that has a decimal point."""
    bounds = f", {low:g} or more" if high == LARGEST_FLOAT else f" from {low:g} to {high:g}"
    accepted = f"a number{bounds}{', written with a decimal point' if point else ''}"

    def test(name: str, value: Any) -> None:
        fits = type(value) is float or (type(value) is int and not point)
        finite = fits and (type(value) is int or math.isfinite(value))
        if not finite or not low <= value <= high:
            raise invalid(name, f"{name} is {describe_value(value)}; accepted: {accepted}")

    return test


def _typed(accepted: str, *types: type) -> Check:
    def test(name: str, value: Any) -> None:
        if type(value) not in types:
            raise invalid(name, f"{name} is {describe_value(value)}; accepted: {accepted}")

    return test


def _stop(name: str, value: Any) -> None:
    accepted = (
        f"a string or a list of at most {MOST_STOPS} strings, "
        f"{MOST_STOP_CHARACTERS} characters in all"
    )
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list):
        raise invalid(name, f"stop is {describe_value(value)}; accepted: {accepted}")
    if len(stops) > MOST_STOPS:
        raise invalid(name, f"stop is a list of {len(stops)}; accepted: {accepted}")
    for stop in stops:
        if not isinstance(stop, str):
            raise invalid(name, f"stop holds {describe_value(stop)}; accepted: {accepted}")
    length = sum(map(len, stops))
    if length > MOST_STOP_CHARACTERS:
        raise invalid(name, f"stop has {length} characters; accepted: {accepted}")


def _repetition_penalty(name: str, value: Any) -> None:
    """Stock divides logits by it; 0 turns it off."""
    _number(0, LARGEST_WEIGHT)(name, value)
    least = 1 / LARGEST_WEIGHT
    if 0 < value < least:
        accepted = f"0, or a number from {least:g} to {LARGEST_WEIGHT:g}"
        raise invalid(name, f"{name} is {describe_value(value)}; accepted: {accepted}")


def _logit_bias(name: str, value: Any) -> None:
    """Checks the shape alone: killer_request compares the ids with the model."""
    accepted = "an object of token ids and numbers, or null"
    if value is None:
        return
    if not isinstance(value, dict):
        raise invalid(name, f"logit_bias is {describe_value(value)}; accepted: {accepted}")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MOST_ID_DIGITS):
            shown = json.dumps(key[:_SHOWN_LENGTH])
            raise invalid(name, f"logit_bias has the key {shown}; accepted: {accepted}")
        _weight(f"logit_bias[{key}]", bias)


def _stream_options(name: str, value: Any) -> None:
    _typed("an object or null", dict, type(None))(name, value)
    if value and "include_usage" in value:
        usage = value["include_usage"]
        _typed("true, false or null", bool, type(None))("stream_options.include_usage", usage)


def _tools(name: str, value: Any) -> None:
    # To stock this means that there are no tools.
    if value == {}:
        return
    _typed("a list of objects, or null", list, type(None))(name, value)
    for index, tool in enumerate(value or []):
        _typed("an object", dict)(f"{name}[{index}]", tool)


def _role_mapping(name: str, value: Any) -> None:
    _typed("an object of strings, or null", dict, type(None))(name, value)
    for role, text in (value or {}).items():
        _typed("a string", str)(f"role_mapping.{role[:_SHOWN_LENGTH]}", text)


def _chat_template_kwargs(name: str, value: Any) -> None:
    _typed("an object or null", dict, type(None))(name, value)
    for key in value or {}:
        reserved = key in RESERVED_KEYWORDS and value[key] not in (None, False)
        if key in KEYWORDS_OF_STOCK or reserved:
            accepted = "variables of the model's template"
            raise invalid(name, f"chat_template_kwargs has {key}; accepted: {accepted}")


def _prompt(name: str, value: Any) -> None:
    if isinstance(value, list):
        accepted = "one string a request"
        raise invalid(
            name, f"prompt is a list, which mlx_lm.server does not take; accepted: {accepted}"
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
    # To stock any false value means that there are no calls.
    if not calls:
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


_weight = _number(-LARGEST_WEIGHT, LARGEST_WEIGHT)
_switch = _typed("true or false", bool)
_name = _typed("a string", str)
_name_or_none = _typed("a string or null", str, type(None))
_context_size = _whole(0, LARGEST_INT32)
_FIELDS: dict[str, Check] = {
    "stream": _switch,
    "stream_options": _stream_options,
    "model": _name,
    "draft_model": _name_or_none,
    "adapters": _name_or_none,
    "num_draft_tokens": _whole(0, MOST_DRAFT_TOKENS),
    "max_completion_tokens": _whole(1, null=True),
    "max_tokens": _whole(1),
    "temperature": _number(0),
    "top_p": _number(0, 1),
    "top_k": _whole(0, LARGEST_INT32),
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
    "seed": _whole(0, LARGEST_UINT64, null=True),
    "chat_template_kwargs": _chat_template_kwargs,
    "stop": _stop,
    "tools": _tools,
    "role_mapping": _role_mapping,
}
