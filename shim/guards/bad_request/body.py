"""A request's body as JSON: what the server can work on at all, whatever it asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...core.errors import ShimError, invalid

DEPTH = 100  # levels of nesting in the body; json, Jinja and pickle each recurse
BRACKETS = 1_000_000  # lists and objects in it: a Python object each, and more where the body is debugged or checked
_LONGEST_SHOWN = 2**64 - 1


def parse(raw: bytes) -> dict[str, Any]:
    """The body as a dict. Raises ShimError 400 where it is no JSON object that the server can work on."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > BRACKETS:
        raise ShimError(
            400, "invalid_json", f"the body has {brackets} brackets; accepted: {BRACKETS}"
        )
    try:
        body = json.loads(raw.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ShimError(
            400, "invalid_json", f"the body is not UTF-8: byte {error.start} is {_hex(error)}"
        ) from None
    except RecursionError:
        raise ShimError(
            400, "invalid_json", f"the body is nested too deep; accepted: {DEPTH} levels"
        ) from None
    except ValueError as error:  # JSONDecodeError, or an integer of more digits than Python reads
        raise ShimError(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ShimError(
            400, "invalid_json", f"the body must be a JSON object, not {describe_value(body)}"
        )
    _walk(body)
    return body


def describe_value(value: Any) -> str:
    """A value as an error repeats it: its kind, and itself where it is short."""
    kind = _kind(value)
    if isinstance(value, (bool, type(None), list, dict)):
        return kind
    text = (
        json.dumps(value)
        if isinstance(value, str) or _is_short(value)
        else f"of {value.bit_length()} bits"
    )
    return f"{kind} {text if len(text) <= 60 else text[:57] + '...'}"  # noqa: PLR2004


def _is_short(value: float) -> bool:
    return isinstance(value, float) or -_LONGEST_SHOWN <= value <= _LONGEST_SHOWN


def _hex(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


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
    """Refuse nesting beyond DEPTH, and strings that no tokenizer can encode, wherever in the body."""
    level: list[tuple[str, Any]] = [("", body)]
    for _ in range(DEPTH):
        level = [(top, item) for where, outer in level for top, item in _inner(where, outer)]
        if not level:
            return
    field = _field(level[0][0])
    raise invalid(field, f"{field} is nested too deep; accepted: {DEPTH} levels in the body")


def _inner(top: str, outer: Any) -> Iterator[tuple[str, Any]]:
    """The lists and objects in a list or an object, each with the field of the request that it is part of."""
    if outer.__class__ is dict:
        for key, item in outer.items():
            _encodable(top or key, key)
            yield from _inner(top or key, [item])
        return
    for item in outer:  # of numbers there may be millions
        kind = item.__class__
        if kind is str:
            _encodable(top, item)
        elif kind is list or kind is dict:
            yield top, item


def _field(top: str) -> str:
    return top[:60].encode(errors="replace").decode()


def _encodable(top: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            field = _field(top)
            raise invalid(
                field, f"{field} has half a surrogate pair, \\u{ord(text[error.start]):04x}"
            ) from None
