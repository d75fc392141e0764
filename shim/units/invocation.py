"""Takes a server command apart: interpreter, its options, way into mlx_lm.server, arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import Refused

ACCEPTED = (
    "accepted: PYTHON -m mlx_lm server ..., mlx_lm.server ...,"
    " PYTHON -m shim run ... or mlx-lm-shim run ..."
)
# Modules and console scripts, each with the subcommand that makes it the server.
_PROGRAMS = {"mlx_lm.server": None, "mlx_lm": "server", "shim": "run", "mlx-lm-shim": "run"}
_SCRIPTS = ("mlx_lm.server", "mlx_lm", "mlx-lm-shim")
# Options of the interpreter that take a value. The words after m or c belong to the program.
_TAKE_A_VALUE = "mcWX"
# Bytes of a console script to read. No script has more before its first import.
_SCANNED = 4096
# Options of the interpreter that keep the shim out, and how.
DEAF = {
    "I": "isolates Python from PYTHONPATH",
    "E": "makes Python ignore PYTHONPATH",
    "S": "makes Python import no sitecustomize",
}


@dataclass(frozen=True)
class Invocation:
    """A server command taken apart. `flags` are the letters of the interpreter's options."""

    argv: tuple[str, ...]
    # The index where the arguments of mlx_lm.server begin.
    start: int
    flags: str
    program: str
    # The index of the console script, if there is one. At 0 its first line names the interpreter.
    script: int | None

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.argv[self.start :]

    @property
    def is_ours(self) -> bool:
        """Whether it is the shim's own `run`, which needs no PYTHONPATH."""
        return _PROGRAMS[self.program] == "run"


def take_apart(argv: Sequence[str]) -> Invocation:
    """Raises Refused where `argv` does not start mlx_lm.server in a way that the shim guards."""
    if not argv:
        raise Refused(f"no server command was given; {ACCEPTED}")
    flags, is_module, start = (
        ("", False, 1) if Path(argv[0]).name in _SCRIPTS else _interpreter(argv)
    )
    program = argv[start - 1] if start <= len(argv) else ""
    script = None if is_module else start - 1
    name = re.sub(r"^-\w*?m(?=.)", "", program) if is_module else Path(program).name
    if name not in _PROGRAMS:
        raise Refused(
            f"{quote_command(argv)} does not start mlx_lm.server under the shim; {ACCEPTED}"
        )
    subcommand = _PROGRAMS[name]
    if subcommand is not None:
        if list(argv[start : start + 1]) != [subcommand]:
            raise Refused(f"{quote_command(argv)} lacks `{subcommand}` after {name}; {ACCEPTED}")
        start += 1
    return Invocation(tuple(argv), start, flags, name, script)


def _interpreter(argv: Sequence[str]) -> tuple[str, bool, int]:
    """Read the interpreter's options.

    Returns (their letters, whether -m names a module, index after the module or script).
    """
    flags, index = "", 1
    while index < len(argv):
        word = argv[index]
        if word == "--check-hash-based-pycs":
            index += 2
            continue
        if not word.startswith("-") or word in ("-", "--"):
            return flags, False, index + 1
        letters = re.match(rf"-([^{_TAKE_A_VALUE}]*)([{_TAKE_A_VALUE}]?)(.*)", word, re.DOTALL)
        # It begins with a dash, so it matches.
        assert letters is not None  # noqa: S101
        flags += letters[1]
        index += 2 if letters[2] and not letters[3] else 1
        if letters[2] == "c":
            break
        if letters[2] == "m":
            return flags, True, index
    raise Refused(f"{quote_command(argv)} names neither a module nor a script; {ACCEPTED}")


def quote_command(argv: Sequence[str], limit: int = 100) -> str:
    """Quote a command for a message, cut short where it is long."""
    text = " ".join(argv)
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def option(arguments: Sequence[str], name: str, shortest: str) -> tuple[int, str] | None:
    """Find the last --NAME in mlx_lm.server's arguments, by argparse's rules.

    Returns (index of the token, value). `shortest` is the shortest abbreviation of it.
    """
    found = None
    for index, token in enumerate(arguments):
        word, equals, value = token.partition("=")
        if not (word.startswith(shortest) and name.startswith(word)):
            continue
        if equals:
            found = index, value
        elif index + 1 < len(arguments):
            found = index, arguments[index + 1]
    return found


MODEL, PORT, HOST, ADAPTER, DRAFT = (
    ("--model", "--mo"),
    ("--port", "--po"),
    ("--host", "--ho"),
    ("--adapter-path", "--ad"),
    ("--draft-model", "--dr"),
)


def replace_option(arguments: Sequence[str], index: int, value: str) -> list[str]:
    """The arguments with another value for the option at `index`."""
    changed = list(arguments)
    word, equals, _ = changed[index].partition("=")
    if equals:
        changed[index] = f"{word}={value}"
    else:
        changed[index + 1] = value
    return changed


def flags_that_exclude_us(flags: str) -> list[str]:
    """Name each of the interpreter's options that keeps the shim out, and say how."""
    return [f"-{letter} {why}" for letter, why in DEAF.items() if letter in flags]


def interpreter_of(script: Path) -> list[str]:
    """The interpreter of a console script, and its options.

    Where the path is long or has a space, installers write `#!/bin/sh`, and an exec on the second
    line. Raises Refused where the first line names no interpreter.
    """
    try:
        with script.open("rb") as opened:
            lines = opened.read(_SCANNED).decode(errors="replace").splitlines()
    except OSError as error:
        raise Refused(f"{script} cannot be read: {error.strerror}") from None
    first = lines[0] if lines else ""
    if not first.startswith("#!"):
        raise Refused(f"{script} is not a console script: its first line names no interpreter")
    words = first[2:].split()
    if words and Path(words[0]).name == "sh" and len(lines) > 1:
        hidden = re.match(r"'''exec' (?:\"([^\"]+)\"|(\S+)) (?:(-\S+) )?\"\$0\"", lines[1])
        if hidden:
            return [hidden[1] or hidden[2], *([hidden[3]] if hidden[3] else [])]
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    if not words:
        raise Refused(f"{script} is not a console script: its first line names no interpreter")
    return words
