"""Reads a request's body as JSON, and refuses what the server cannot work on at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...core.errors import ShimError, invalid

# Levels of nesting in the body; json, Jinja and pickle each recurse.
MOST_LEVELS = 100
# Lists and objects in the body. Each becomes a Python object, and several where stock logs the body
# or the shim checks it.
MOST_BRACKETS = 1_000_000
# An error repeats a whole number up to this size, and tells only the bits of a larger one.
_LARGEST_SHOWN = 2**64 - 1
# Characters of a value, or of a field's name, that an error repeats.
_SHOWN_LENGTH = 60


def parse(raw: bytes) -> dict[str, Any]:
    """The body as a dict. Raises ShimError 400 where the server cannot work on it."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MOST_BRACKETS:
        raise ShimError(
            400, "invalid_json", f"the body has {brackets} brackets; accepted: {MOST_BRACKETS}"
        )
    try:
        body = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ShimError(
            400, "invalid_json", f"the body is not UTF-8: byte {error.start} is {_hex(error)}"
        ) from None
    except RecursionError:
        raise ShimError(
            400, "invalid_json", f"the body is nested too deep; accepted: {MOST_LEVELS} levels"
        ) from None
    # JSONDecodeError, or an integer with more digits than Python reads.
    except ValueError as error:
        raise ShimError(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ShimError(
            400, "invalid_json", f"the body must be a JSON object, not {describe_value(body)}"
        )
    _walk(body)
    return body


def describe_value(value: Any) -> str:
    """A value as an error repeats it: its kind, and the value itself where it is short."""
    kind = _kind(value)
    if isinstance(value, (bool, type(None), list, dict)):
        return kind
    if isinstance(value, str) or _is_short(value):
        text = json.dumps(value)
    else:
        text = f"of {value.bit_length()} bits"
    return f"{kind} {text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + '...'}"


def _is_short(value: float) -> bool:
    return isinstance(value, float) or -_LARGEST_SHOWN <= value <= _LARGEST_SHOWN


def _hex(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {
        str: "the string",
        int: "the number",
        float: "the number",
        list: "a list",
        dict: "an object",
    }
    return kinds[type(value)]


def _walk(body: Any) -> None:
    """Refuse nesting beyond MOST_LEVELS, and strings that no tokenizer can encode."""
    level: list[tuple[str, Any]] = [("", body)]
    for _ in range(MOST_LEVELS):
        level = [(top, item) for where, outer in level for top, item in _inner(where, outer)]
        if not level:
            return
    field = _field(level[0][0])
    accepted = f"accepted: {MOST_LEVELS} levels in the body"
    raise invalid(field, f"{field} is nested too deep; {accepted}")


def _inner(top: str, outer: Any) -> Iterator[tuple[str, Any]]:
    """The lists and objects in a list or an object, each with the request's field it is part of.

    Refuses a string in it that cannot be encoded.
    """
    if outer.__class__ is dict:
        for key, item in outer.items():
            _encodable(top or key, key)
            yield from _inner(top or key, [item])
        return
    # It may hold millions of numbers.
    for item in outer:
        kind = item.__class__
        if kind is str:
            _encodable(top, item)
        elif kind is list or kind is dict:
            yield top, item


def _field(top: str) -> str:
    return top[:_SHOWN_LENGTH].encode(errors="replace").decode()


def _encodable(top: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            field, half = _field(top), f"\\u{ord(text[error.start]):04x}"
            raise invalid(field, f"{field} has half a surrogate pair, {half}") from None
