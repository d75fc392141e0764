"""What defeats the shim in a unit of any format: its command, its environment, its time to stop."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core import settings, values
from . import Refused, environ, shell
from .invocation import MODEL, Invocation, flags_that_exclude_us, interpreter_of, option, take_apart

# The class in the shim's sitecustomize.py.
_OURS = "MlxLmShimFinder"
_MUST_NOT_LEAVE = ("setsid", "screen", "tmux", "daemon", "daemonize", "start-stop-daemon", "disown")
_HARMLESS = ("env", "caffeinate", "arch", "nohup", "nice", "ionice", "stdbuf", "taskpolicy", "chrt")
_TAKE_A_VALUE = {
    "nice": "n",
    "ionice": "cn",
    "caffeinate": "tw",
    "env": "uCS",
    "taskpolicy": "cdgt",
    "stdbuf": "oei",
}
# Without these guards, a server with a dead engine does not exit.
_EXIT_GUARDS = ("generation_death", "orphaned_process", "stall")
# A value with such a character is replaced before it counts.
OPAQUE = re.compile(r"[$%]")


@dataclass(frozen=True)
class Finding:
    """One line of the check: where, what is wrong, and what to write instead.

    `defeats` tells whether it defeats the shim or is only worth a note.
    """

    file: str
    defeats: bool
    where: str
    what: str
    write: str

    def __str__(self) -> str:
        kind = "DEFEATS" if self.defeats else "note"
        return " ".join(
            f"{self.file}: {kind}: {self.where}: {self.what}; write {self.write}".split()
        )


@dataclass
class Findings:
    """Collects the findings in one file."""

    file: str
    found: list[Finding] = field(default_factory=list)

    def defeats(self, where: str, what: str, write: str) -> None:
        self.found.append(Finding(self.file, True, where, what, write))

    def note(self, where: str, what: str, write: str) -> None:
        self.found.append(Finding(self.file, False, where, what, write))


@dataclass(frozen=True)
class Facts:
    """The facts that every format has."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    workdir: str
    command_at: str
    environ_at: str
    # How this format writes PYTHONPATH, with {} for the folder.
    python_path: str
    stop_at: str
    # Seconds; None for no limit.
    stop: float | None
    # With {} for the seconds.
    stop_write: str
    # What happens where the limit is missing, if no figure is certain.
    stop_missing: str = ""


def common(found: Findings, facts: Facts, folder: Path) -> None:
    """Check everything that does not depend on the format."""
    argv, within, shelled = _unwrap(found, facts)
    variables = {**facts.environ, **within}
    known = None
    try:
        known = take_apart(argv)
    except Refused as error:
        found.note(
            facts.command_at, f"what it runs cannot be told: {error}", "the server command itself"
        )
    if known is not None:
        _options(found, facts, known)
        # A shell has its own PATH and folder, and replaces a ~.
        if not shelled:
            _paths(found, facts, known)
    _environment(found, facts, variables, folder, needs_path=known is None or not known.is_ours)
    _stop(found, facts, variables)


def _unwrap(found: Findings, facts: Facts) -> tuple[list[str], dict[str, str], bool]:
    """Look through programs that start programs, such as env, to the server command.

    Returns the command, what they add to its environment, and whether one of them is a shell.
    """
    argv, variables, shelled = list(facts.argv), dict[str, str](), False
    for _ in range(5):
        name = Path(argv[0]).name if argv else ""
        if name in _MUST_NOT_LEAVE:
            why = (
                f"{name} may start the server in another process: neither status nor SIGTERM passes"
            )
            found.defeats(facts.command_at, why, "the server command itself")
            return _skip_program(argv, variables), variables, shelled
        if name in _HARMLESS:
            if name == "nohup":
                found.note(
                    facts.command_at,
                    "nohup does nothing under a supervisor",
                    "the command without it",
                )
            if name == "taskpolicy" and "-b" in argv:
                found.defeats(
                    facts.command_at,
                    "taskpolicy -b throttles it, which looks like a stall",
                    "no taskpolicy",
                )
            argv = _skip_program(argv, variables)
            continue
        script = shell.script_of(argv)
        within = shell.look(*script) if script else None
        if within is None:
            return argv, variables, shelled
        if within.fault:
            found.defeats(
                facts.command_at,
                within.fault,
                "`exec` before the server command, as the last command",
            )
        elif within.hint:
            found.note(facts.command_at, within.hint, "`exec` before the server command")
        # Not Path.expanduser: a value need not be a path.
        variables |= {
            name: os.path.expanduser(value)  # noqa: PTH111
            for name, value in within.environ.items()
        }
        argv, shelled = within.argv, True
    return argv, variables, shelled


def _skip_program(argv: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The words after such a program, its options and its assignments."""
    takes = _TAKE_A_VALUE.get(Path(argv[0]).name, "")
    rest = list(argv[1:])
    while rest and (
        rest[0].startswith("-") or re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0], re.DOTALL)
    ):
        word = rest.pop(0)
        if not word.startswith("-"):
            name, _, value = word.partition("=")
            variables[name] = value
        elif rest and len(word) == len("-n") and word[1] in takes:
            rest.pop(0)
    return rest


def _options(found: Findings, facts: Facts, known: Invocation) -> None:
    flags = known.flags
    program = Path(known.argv[known.script]) if known.script is not None else None
    if program is not None and known.script == 0 and program.is_absolute() and program.exists():
        try:
            first, *options = interpreter_of(program)
            flags = take_apart([first, *options, "-m", "mlx_lm.server"]).flags
        except Refused as error:
            found.note(facts.command_at, str(error), "PYTHON -m mlx_lm server")
    for why in flags_that_exclude_us(flags):
        found.defeats(
            facts.command_at, f"{why}: the server runs as stock", "the command without that option"
        )


def _paths(found: Findings, facts: Facts, known: Invocation) -> None:
    first = known.argv[0]
    if not OPAQUE.search(first):
        if first.startswith("~"):
            found.defeats(
                facts.command_at, f"{first!r}: no shell replaces the ~", "the absolute path"
            )
        elif not first.startswith("/"):
            found.defeats(
                facts.command_at,
                f"{first!r} is not an absolute path: another program, or none, is run",
                "the path",
            )
        elif not Path(first).exists():
            found.defeats(
                facts.command_at,
                f"{first!r} does not exist here",
                "the path of an interpreter that exists",
            )
    _model(found, facts, known)


def _model(found: Findings, facts: Facts, known: Invocation) -> None:
    model = option(known.arguments, *MODEL)
    if model is None or OPAQUE.search(model[1]):
        return
    path = model[1]
    if path.startswith("/"):
        if not Path(path).exists():
            found.defeats(
                facts.command_at,
                f"--model {path!r} does not exist here: exit 78",
                "a folder that exists",
            )
    elif path.startswith("~") or (path.startswith(".") and not facts.workdir):
        found.defeats(
            facts.command_at,
            f"--model {path!r} is not an absolute path: exit 78",
            "the absolute path",
        )


def _environment(
    found: Findings, facts: Facts, variables: Mapping[str, str], folder: Path, *, needs_path: bool
) -> None:
    where = facts.environ_at
    write = facts.python_path.format(folder)
    if variables.get(settings.KILL_SWITCH, "").strip().lower() in values.OFF:
        found.defeats(
            where, f"{settings.KILL_SWITCH} is off: the server runs as stock", "nothing instead"
        )
    if needs_path:
        why = _python_path(variables.get("PYTHONPATH"), facts.workdir)
        if why:
            found.defeats(where, f"{why}: the server runs as stock", write)
    for name in (settings.variable(guard) for guard in _EXIT_GUARDS):
        if variables.get(name, "").strip().lower() in values.OFF:
            found.defeats(
                where,
                f"{name} is off: a server that is dead inside does not exit",
                "nothing instead",
            )
    if variables.get(settings.variable("on_stall"), "").strip().lower() == "dump":
        found.note(
            where, "MLX_SHIM_ON_STALL=dump: a stalled server is not restarted", "nothing instead"
        )
    for name, value in variables.items():
        why = environ.secret(name, value)
        if why:
            found.defeats(where, f"{name}: {why}", "nothing instead")
    _, bad, unknown = settings.load({k: v for k, v in variables.items() if not OPAQUE.search(v)})
    for text in (*bad, *unknown):
        found.note(where, text, "what is accepted")


def _python_path(value: str | None, workdir: str) -> str:
    """Say why this PYTHONPATH does not lead to the shim. Empty where it does, or may."""
    if not value:
        return "PYTHONPATH is missing"
    for part in value.split(os.pathsep):
        if OPAQUE.search(part):
            return ""
        if part.startswith("~") or (part and not part.startswith("/") and not workdir):
            return f"PYTHONPATH has {part!r}, which is not an absolute path"
        file = Path(workdir or "/") / part / "sitecustomize.py"
        if part and file.is_file():
            return (
                ""
                if _OURS in file.read_text(errors="replace")
                else f"{file} comes first, and is not the shim's"
            )
    return f"PYTHONPATH={value!r} holds no folder with the shim's sitecustomize.py"


def _stop(found: Findings, facts: Facts, variables: Mapping[str, str]) -> None:
    try:
        needed, limit = environ.drain(variables), environ.stop_limit(variables)
    except Refused as error:
        found.note(facts.environ_at, str(error), "a duration")
        return
    write = facts.stop_write.format(limit)
    if facts.stop is None:
        found.note(
            facts.stop_at, "it waits without limit for the server to stop, also at shutdown", write
        )
    elif facts.stop_missing:
        found.defeats(
            facts.stop_at,
            f"it is missing: {facts.stop_missing}; the drain takes up to {needed:g} s",
            write,
        )
    elif facts.stop < needed:
        what = (
            f"SIGKILL after {facts.stop:g} s, and the drain takes up to {needed:g} s:"
            " requests in flight are lost"
        )
        found.defeats(facts.stop_at, what, write)
