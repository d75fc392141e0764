"""Reads systemd's units by systemd.syntax(7) and systemd.service(5), as far as a check needs it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_UNITS = {
    "us": 1e-6,
    "usec": 1e-6,
    "ms": 1e-3,
    "msec": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "": 1.0,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hr": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_TOKEN = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0-7]{3}|.)|"|'|\s+|[^\\"'\s]+""", re.DOTALL
)


@dataclass
class Entries:
    """Assignments in order: section, key, value, line. An empty value clears the earlier ones."""

    found: list[tuple[str, str, str, int]] = field(default_factory=list)

    def get(self, section: str, key: str) -> list[tuple[str, int]]:
        held: list[tuple[str, int]] = []
        for where, name, value, line in self.found:
            if (where, name) == (section, key):
                held = [*held, (value, line)] if value else []
        return held

    def all(self, section: str, key: str) -> list[str]:
        return [value for value, _ in self.get(section, key)]

    def last(self, section: str, key: str, default: str) -> str:
        return (self.all(section, key) or [default])[-1]

    def at(self, section: str, key: str) -> str:
        held = self.get(section, key)
        return (
            f"line {held[-1][1]}: [{section}] {key}"
            if held
            else f"[{section}] {key}, which is missing"
        )


def parse(text: str) -> Entries:
    """The assignments of a unit. Like systemd, it skips a line that is not one."""
    entries, section = Entries(), ""
    held, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        # A comment may also stand between continued lines.
        if line.lstrip().startswith(("#", ";")):
            continue
        first = first if held else number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        whole, held = (held + line).strip(), ""
        if whole.startswith("[") and whole.endswith("]"):
            section = whole[1:-1]
        elif "=" in whole:
            key, _, value = whole.partition("=")
            entries.found.append((section, key.strip(), value.strip(), first))
    return entries


def words(text: str) -> list[str]:
    """The words, with quotes and C escapes undone and %% and %h replaced. Other specifiers stay."""
    found: list[str] = []
    word: str | None = None
    quote = ""
    for token in _TOKEN.findall(text):
        if token in ("'", '"') and quote in ("", token):
            quote = "" if quote else token
            word = word or ""
        elif token.isspace() and not quote:
            found += [word] if word is not None else []
            word = None
        else:
            word = (word or "") + (_unescape(token) if token.startswith("\\") else token)
    found += [word] if word is not None else []
    return [replace_specifiers(word) for word in found]


def _unescape(token: str) -> str:
    code = token[1:]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16))
    if re.fullmatch(r"[0-7]{3}", code):
        return chr(int(code, 8))
    return _ESCAPES.get(code, code)


def replace_specifiers(text: str) -> str:
    """Replace the specifiers that mean the same here: %% and %h."""
    return re.sub(r"%([%h])", lambda m: "%" if m[1] == "%" else str(Path.home()), text)


def environment(unit: Entries) -> dict[str, str]:
    """The variables of Environment= and of the files in EnvironmentFile= that can be read."""
    found: dict[str, str] = {}
    for value in unit.all("Service", "Environment"):
        for word in words(value):
            name, equals, what = word.partition("=")
            if equals:
                found[name] = what
    for name in unit.all("Service", "EnvironmentFile"):
        found |= _of_file(Path(replace_specifiers(name.removeprefix("-"))))
    return found


def _of_file(path: Path) -> dict[str, str]:
    """The NAME=VALUE lines of a file, which may hold secrets: a value like one is left out."""
    from .environ import secret

    found = {}
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";")) and not secret(name, value):
            found[name.strip()] = value.strip().strip("'\"")
    return found


def duration(text: str) -> float | None:
    """Seconds of a time span such as 90 or 1min 30s; None for infinity and for other text."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not parts or any(unit not in _UNITS for _, unit in parts):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
