"""What in a configuration of supervisord defeats the shim."""

from __future__ import annotations

import configparser
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from . import Refused
from .findings import Facts, Findings, common

_RESTART = {"70": "a death", "71": "a taken port", "75": "a recycle", "1": "a frozen interpreter"}
_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")
# So many retries are enough.
_ENOUGH_RETRIES = 100
# Seconds that a server takes at least to fail.
_LEAST_RUN = 2


class _Section:
    """A section of the file. It can tell the line of each option."""

    def __init__(self, name: str, options: Mapping[str, str], text: str) -> None:
        self.name = name
        self.options = options
        self._lines = text.splitlines()
        self._first = next(
            (i for i, x in enumerate(self._lines) if x.lstrip().startswith(f"[{name}]")), 0
        )

    def get(self, key: str, default: str) -> str:
        return self.options.get(key, default).strip()

    def at(self, key: str) -> str:
        for number, line in enumerate(self._lines[self._first + 1 :], self._first + 2):
            if line.lstrip().startswith("["):
                break
            if re.match(rf"\s*{key}\s*[=:]", line, re.IGNORECASE):
                return f"line {number}: [{self.name}] {key}"
        return f"[{self.name}] {key}, which is missing"

    def number(self, key: str, default: int) -> int:
        """Raises Refused."""
        try:
            return int(self.get(key, str(default)))
        except ValueError:
            raise Refused(f"{self.at(key)} is not a number") from None


def check(found: Findings, file: Path, raw: bytes, folder: Path) -> None:
    """Raises Refused where the file is not a configuration of supervisord with a program."""
    text = raw.decode(errors="replace")
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise Refused(
            f"{file} is not a configuration of supervisord: {' '.join(str(error).split())}"
        ) from None
    names = [
        n
        for n in parser.sections()
        if n.startswith(("program:", "fcgi-program:")) and "command" in parser[n]
    ]
    servers = [n for n in names if re.search(r"mlx.lm|\bshim run\b", parser[n]["command"])] or names
    if not servers:
        raise Refused(
            f"{file} is not a configuration of supervisord with a [program:...] that has a command"
        )
    shared = parser["supervisord"].get("environment", "") if "supervisord" in parser else ""
    for name in servers:
        section = _Section(name, parser[name], text)
        _restart(found, section)
        _stop(found, section)
        common(found, _facts(section, shared, file), folder)


def _facts(section: _Section, shared: str, file: Path) -> Facts:
    program = section.name.partition(":")[2]
    try:
        argv = shlex.split(_expand(section.get("command", ""), file, program))
        variables = pairs(_expand(shared, file, program)) | pairs(
            _expand(section.get("environment", ""), file, program)
        )
    except ValueError as error:
        raise Refused(f"[{section.name}] cannot be read: {error}") from None
    return Facts(
        argv,
        variables,
        section.get("directory", ""),
        section.at("command"),
        section.at("environment"),
        'environment=PYTHONPATH="{}"',
        section.at("stopwaitsecs"),
        float(section.number("stopwaitsecs", 10)),
        "stopwaitsecs={}",
    )


def pairs(text: str) -> dict[str, str]:
    """Read NAME=VALUE,NAME="VALUE" like supervisord: without escapes. Raises ValueError."""
    found = {}
    lexer = shlex.shlex(text)
    lexer.wordchars += "/.+-():"
    words = list(lexer)
    for index in range(0, len(words), 4):
        name, equals, value = (*words[index : index + 3], "", "")[:3]
        if equals != "=":
            raise ValueError(f"environment= is not NAME=VALUE,NAME=VALUE at {name!r}")
        found[name] = value.strip("'\"")
    return found


def _expand(text: str, file: Path, program: str) -> str:
    """The text with %(here)s and the like replaced. An unknown one stays, and is not judged."""
    text = text.replace("%(here)s", str(file.resolve().parent))

    def value(match: re.Match[str]) -> str:
        name = match[1] or ""
        if match[0] == "%%":
            return "%"
        if name.startswith("ENV_"):
            return os.environ.get(name.removeprefix("ENV_"), match[0])
        return {"program_name": program, "process_num": "1"}.get(name, match[0])

    return re.sub(r"%%|%\((\w+)\)[sd]", value, text)


def _restart(found: Findings, section: _Section) -> None:
    restart = section.get("autorestart", "unexpected").lower()
    at, write = section.at("autorestart"), "autorestart=true"
    if restart in _FALSE:
        found.defeats(at, f"{restart}: supervisord does not restart a server that exited", write)
    elif restart not in (*_TRUE, "unexpected"):
        found.defeats(at, f"{restart!r} is not a value that supervisord takes", write)
    if restart == "unexpected":
        expected = {code.strip() for code in section.get("exitcodes", "0").split(",")}
        for code in sorted(expected & set(_RESTART)):
            what = f"{code} ({_RESTART[code]}) counts as expected and is not restarted"
            found.defeats(section.at("exitcodes"), what, "exitcodes=0, or autorestart=true")
        found.note(at, "after a SIGTERM from elsewhere (status 0) it stays down", write)
    if section.get("autostart", "true").lower() in _FALSE:
        found.note(section.at("autostart"), "it is not started with supervisord", "autostart=true")
    seconds, retries = section.number("startsecs", 1), section.number("startretries", 3)
    if seconds > _LEAST_RUN and retries < _ENOUGH_RETRIES:
        what = f"after {retries} starts that end within {seconds} s supervisord gives up (FATAL)"
        found.defeats(section.at("startretries"), what, "startretries=1000000")
    if section.number("numprocs", 1) > 1 and "socket" not in section.options:
        found.defeats(
            section.at("numprocs"), "all but one find the port taken: exit 71", "numprocs=1"
        )


def _stop(found: Findings, section: _Section) -> None:
    name = section.get("stopsignal", "TERM").upper().removeprefix("SIG")
    if name not in ("TERM", "INT", "15", "2"):
        found.defeats(
            section.at("stopsignal"), f"{name} ends the server at once: no drain", "stopsignal=TERM"
        )
