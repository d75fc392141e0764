"""What a shell between a supervisor and the server does to the server's status and to SIGTERM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("sh", "bash", "zsh", "dash", "ksh", "fish")
_SERVERS = {"mlx_lm", "mlx_lm.server", "mlx-lm-shim"}
_KEYWORDS = {"do", "then", "else", "{", "(", "!", "time", "command", "builtin"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Characters. A script that starts a server is short.
_LARGEST_SCRIPT = 100_000


@dataclass
class Within:
    """The server command that a shell runs, its environment, and what is wrong with the script."""

    argv: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    # A fault defeats the shim, a hint does not.
    fault: str = ""
    hint: str = ""


def is_shell(argv: Sequence[str]) -> bool:
    return bool(argv) and Path(argv[0]).name in NAMES


def script_of(argv: Sequence[str]) -> tuple[str, list[str]] | None:
    """The script of `sh -c TEXT ...`, `sh FILE ...`, or a shell script that can be read here.

    Returns (text, its arguments from $0 on).
    """
    if is_shell(argv):
        for index, word in enumerate(argv[1:], 1):
            if re.fullmatch(r"-[a-z]*c", word):
                return (argv[index + 1], list(argv[index + 2 :])) if index + 1 < len(argv) else None
            if not word.startswith("-"):
                return _read(list(argv[index:]))
        return None
    return _read(list(argv), must_be_shell=True)


def _read(argv: list[str], *, must_be_shell: bool = False) -> tuple[str, list[str]] | None:
    try:
        with Path(argv[0]).open(encoding="utf-8") as script:
            text = script.read(_LARGEST_SCRIPT)
    except (OSError, ValueError, IndexError):
        # It is not here, or not text: what it does cannot be told.
        return None
    shebang = text.splitlines()[0].removeprefix("#!").split() if text.startswith("#!") else []
    if must_be_shell and (
        not any(Path(word).name in NAMES for word in shebang) or "'''exec'" in text
    ):
        # Not a shell script, or a console script whose second line is an exec.
        return None
    return text, argv


def commands(text: str) -> list[tuple[list[str], str]]:
    """The simple commands of a script, each with the operator after it.

    Raises ValueError for open quotes.
    """
    text = re.sub(r"^\s*#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    found: list[tuple[list[str], str]] = []
    words: list[str] = []
    skip = False
    for token in lexer:
        if skip:
            skip = False
        elif set(token) <= set("();<>|&\n"):
            if "<" in token or ">" in token:
                # The next word is the file.
                skip = True
                continue
            if words:
                found.append((words, token.strip("\n()") or ";"))
            words = []
        else:
            words.append(token)
    return [*found, (words, "")] if words else found


def look(text: str, arguments: Sequence[str]) -> Within | None:
    """Find the server command in a script; None where there is none. `arguments` start at $0."""
    try:
        steps = commands(text)
    except ValueError:
        return None
    environ: dict[str, str] = {}
    for index, (words, operator) in enumerate(steps):
        rest = _strip_assignments(words, environ)
        if not _is_server(rest, arguments):
            continue
        execs = "exec" in rest[:1]
        argv = rest[1:] if execs else rest
        if '"$@"' in argv or "$@" in argv:
            at = argv.index("$@")
            argv = [*argv[:at], *arguments[1:], *argv[at + 1 :]]
        within = Within(argv, environ)
        before = [step for step, _ in steps[:index] if _strip_assignments(step, {})]
        within.fault = _fault(operator, execs, bool(before), index + 1 < len(steps))
        if not within.fault and not execs:
            within.hint = (
                "the shell stands between the supervisor and the server, unless it happens to exec"
            )
        return within
    return None


def _is_server(words: Sequence[str], arguments: Sequence[str]) -> bool:
    names = {Path(word).name for word in words}
    if names & _SERVERS or ("-m" in words and "shim" in words):
        return True
    return "$@" in words and bool(
        {Path(word).name for word in arguments} & _SERVERS or "shim" in arguments
    )


def _strip_assignments(words: Sequence[str], environ: dict[str, str]) -> list[str]:
    """The words after assignments, `export` and keywords. The assignments go into `environ`."""
    rest = list(words)
    while rest and rest[0] in _KEYWORDS:
        rest.pop(0)
    exports = rest[:1] == ["export"]
    if exports:
        rest.pop(0)
    while rest and _ASSIGNMENT.fullmatch(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        environ[name] = value
    return [] if exports else rest


def _fault(operator: str, execs: bool, before: bool, after: bool) -> str:
    if operator.startswith("||"):
        return "what follows || swallows the server's status: the supervisor sees another"
    if operator.startswith("|"):
        return (
            "the status of a pipe is that of its last command, not the server's,"
            " and SIGTERM does not reach the server"
        )
    if operator == "&":
        return (
            "& puts the server into the background: the supervisor sees the shell end,"
            " and does not get the server's status or signal"
        )
    if execs:
        return ""
    if after:
        return (
            "the shell's status is that of what follows the server,"
            " and SIGTERM ends the shell: nothing is drained"
        )
    return "SIGTERM ends the shell, not the server: nothing is drained" if before else ""
