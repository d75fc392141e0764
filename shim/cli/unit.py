"""`python -m shim launchd | systemd | supervisord [options] -- SERVER COMMAND` prints a unit.

With --check it reads one instead. Only the unit, or the findings, go to stdout. Advice and warnings
go to stderr.
"""

from __future__ import annotations

import argparse
import getpass
import math
import os
import pwd
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core import memory
from ..units import Refused, check, environ, launchd, server, supervisord, systemd
from ..units.memory_limits import Limits, limits
from ..units.plan import Made, Unit, check_path
from . import path

KINDS = {"launchd": launchd.made, "systemd": systemd.made, "supervisord": supervisord.made}
HELP = (
    "print a {} unit for the server command given after --, or --check FILE: what in a unit defeats"
    " the shim"
)
_DEFAULT_NAMES = {"launchd": "local.mlx-lm", "systemd": "mlx-lm", "supervisord": "mlx-lm"}
# The supervisor's watchdog waits this many times longer than the shim, whose verdict comes first.
_WATCHDOG_FACTOR = 1.1


def main(kind: str, arguments: Sequence[str]) -> int:
    """Return 0; with --check 1 where something defeats the shim; 2 after saying what was wrong."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    options = _parser(kind).parse_args(given[:at])
    command = given[at + 1 :]
    try:
        if options.check:
            return _check(kind, options.check, command)
        unit, warnings = _unit(kind, options, command)
        made = KINDS[kind](unit)
        _write(made, options.output)
    except Refused as error:
        print(f"mlx-lm-shim: {error}", file=sys.stderr)
        return 2
    for text in (*(f"WARNING: {w}" for w in warnings), *made.advice):
        print(f"mlx-lm-shim: {text}" if not text.startswith(" ") else text, file=sys.stderr)
    return 0


def _parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m shim {kind}",
        usage=f"python -m shim {kind} [options] -- SERVER COMMAND\n"
        f"       python -m shim {kind} --check FILE",
        description=HELP.format(kind),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--check",
        metavar="FILE",
        help="say what in FILE defeats the shim: status 1 if anything does, else 0",
    )
    add(
        "--label" if kind == "launchd" else "--name",
        dest="name",
        default=_DEFAULT_NAMES[kind],
        help="%(default)s",
    )
    add(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="put it into the unit; may be repeated",
    )
    add(
        "--log",
        metavar="FILE",
        help="the log; by default the journal, or a file where there is none",
    )
    add(
        "--workdir",
        metavar="DIR",
        default="/",
        help="%(default)s, since Python would import what lies there",
    )
    add(
        "--socket",
        action="store_true",
        help="have the supervisor listen, and the server take the socket over",
    )
    add("--output", metavar="DIR", help="write the unit into DIR, and print its name")
    if kind != "supervisord":
        add(
            "--daemon",
            action="store_true",
            help="a unit of the system: starts at boot, runs as --user",
        )
    add(
        "--user",
        help="whom it runs as; by default you" if kind != "supervisord" else "whom it runs as",
    )
    if kind == "systemd":
        add(
            "--notify",
            action="store_true",
            help="Type=notify: started means that the model answers",
        )
    return parser


def _unit(kind: str, options: argparse.Namespace, command: Sequence[str]) -> tuple[Unit, list[str]]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", options.name, re.ASCII):
        raise Refused(
            f"the name {options.name!r} is not taken; accepted: letters, digits, dots, dashes"
        )
    folder = path.folder()
    variables = environ.collect(environ.given(options.env), folder, os.environ)
    workdir = environ.absolute(options.workdir)
    check_path("--workdir", workdir)
    if not Path(workdir).is_dir():
        raise Refused(f"--workdir {options.workdir!r} is not a folder that exists")
    user = _user(kind, options)
    log = _log(kind, options, user)
    known = server.validate(command, variables, workdir, folder)
    added = limits(known.argv, variables, memory.total()) if kind == "launchd" else Limits({}, "")
    watchdog = math.ceil(environ.seconds(variables, environ.GIL_DEADLINE) * _WATCHDOG_FACTOR)
    unit = Unit(
        options.name,
        tuple(known.argv),
        variables | added.environ,
        environ.stop_limit(variables),
        host=known.host,
        port=known.port,
        workdir=workdir,
        log=log,
        user=user,
        socket=options.socket,
        notify=getattr(options, "notify", False),
        watchdog=watchdog,
        note=added.note,
    )
    return unit, [*environ.doubts(variables, os.environ), *known.warnings]


def _user(kind: str, options: argparse.Namespace) -> str:
    """The user that a system unit runs as; empty for the user's own unit. Raises Refused."""
    if kind != "supervisord" and not options.daemon:
        if options.user:
            raise Refused("--user is for a system unit: add --daemon")
        return ""
    if kind == "supervisord" and not options.user:
        return ""
    name: str = options.user or os.environ.get("SUDO_USER") or getpass.getuser()
    try:
        pwd.getpwnam(name)
    except KeyError:
        raise Refused(f"--user {name!r} is not a user of this machine") from None
    return name


def _log(kind: str, options: argparse.Namespace, user: str) -> str:
    if not options.log and kind != "launchd":
        return ""
    home = Path(pwd.getpwnam(user).pw_dir) if user else Path.home()
    log = environ.absolute(options.log or str(home / "Library" / "Logs" / f"{options.name}.log"))
    check_path("--log", log)
    return log


def _write(made: Made, output: str | None) -> None:
    if output is None:
        if len(made.files) > 1:
            raise Refused(
                f"--socket makes {' and '.join(made.files)}:"
                " name a folder for them with --output DIR"
            )
        print(*made.files.values(), sep="", end="")
        return
    for name, text in made.files.items():
        file = Path(environ.absolute(output)) / name
        try:
            file.write_text(text, encoding="utf-8")
            # launchd refuses a file that others may write.
            file.chmod(0o644)
        except OSError as error:
            raise Refused(f"{file} cannot be written: {error.strerror}") from None
        print(file)


def _check(kind: str, file: str, command: Sequence[str]) -> int:
    if command:
        raise Refused("--check takes a FILE and no server command")
    findings = check.findings(kind, Path(file), path.folder())
    for finding in findings:
        print(finding)
    defeats = sum(finding.defeats for finding in findings)
    if not defeats:
        print(f"{file}: nothing in it defeats the shim")
    return 1 if defeats else 0
