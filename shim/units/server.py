"""Makes the server command of a unit absolute and checks that it can run. Does not import mlx."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..planning import local_model
from . import Refused
from .environ import absolute
from .invocation import (
    ADAPTER,
    DRAFT,
    HOST,
    MODEL,
    PORT,
    Invocation,
    flags_that_exclude_us,
    interpreter_of,
    option,
    replace_option,
    take_apart,
)

# The PATH that launchd gives. The other supervisors give at least this.
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
# Seconds for an interpreter to say what it can import.
_ASK_LIMIT = 60
_MARK = "mlx-lm-shim-answer:"
# PathFinder, because the shim's sitecustomize leaves its name in sys.modules to the one it shadows.
_ASK = f"""\
import importlib.util, json, sys
from importlib.machinery import PathFinder
def place(spec):
    return spec and spec.origin
print("\\n{_MARK}" + json.dumps({{
    "version": list(sys.version_info[:2]),
    "sitecustomize": place(PathFinder.find_spec("sitecustomize")),
    "missing": [n for n in ("mlx_lm", "wrapt", "shim") if importlib.util.find_spec(n) is None],
}}))
"""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_OLDEST = [3, 10]
_HIGHEST_PORT = 65535


@dataclass
class Server:
    """A command that can run, made absolute. Smaller doubts are warnings, not errors."""

    argv: list[str]
    host: str
    port: int
    warnings: list[str] = field(default_factory=list)


def validate(argv: Sequence[str], environ: Mapping[str, str], workdir: str, ours: Path) -> Server:
    """Check the command in full. `ours` is the shim's folder on PYTHONPATH. Raises Refused."""
    _check_words(argv)
    known = take_apart(argv)
    program = _executable(argv[0])
    python, flags = program, known.flags
    if known.script == 0:
        first, *options = interpreter_of(Path(program))
        python = _executable(first)
        flags = take_apart([python, *options, "-m", "mlx_lm.server"]).flags
    if flags_that_exclude_us(flags):
        why = "; ".join(flags_that_exclude_us(flags))
        raise Refused(f"{program} would run without the shim: {why}; leave that option out")
    server = Server([program, *argv[1:]], "", 0)
    if known.script:
        server.argv[known.script] = _script(argv[known.script])
    answer = _answer(python, {"PATH": PATH, "HOME": str(Path.home())} | dict(environ), workdir)
    _check_answer(server, python, answer, ours, known)
    _check_files(server, known, environ)
    _check_address(server, known)
    return server


def _check_words(argv: Sequence[str]) -> None:
    for word in argv:
        if not word.isprintable():
            raise Refused(
                f"{word[:60]!r} has a newline or another character that cannot be printed"
            )
    if argv and re.fullmatch(r"[A-Za-z_]\w*=.*", argv[0]):
        name = argv[0].partition("=")[0]
        raise Refused(
            f"{name}=... before the command is for a shell;"
            f" give it as --env {name}=VALUE before the --"
        )


def _executable(given: str) -> str:
    """The absolute path of a program. Links stay. Raises Refused."""
    found = absolute(given) if "/" in given else shutil.which(given)
    if found is None:
        raise Refused(f"{given!r} is not on PATH; give the program with its path")
    if not Path(found).exists():
        raise Refused(
            f"{given!r} does not exist; give the interpreter of the environment that has mlx-lm"
        )
    if not os.access(found, os.X_OK) or Path(found).is_dir():
        raise Refused(f"{given!r} is not a program that can be run")
    return absolute(found)


def _script(given: str) -> str:
    path = absolute(given)
    if not Path(path).is_file():
        raise Refused(f"{given!r} does not exist; give the console script with its path")
    return path


def _check_answer(
    server: Server, python: str, answer: dict[str, Any], ours: Path, known: Invocation
) -> None:
    missing = set(answer["missing"])
    if answer["version"] < _OLDEST:
        version = ".".join(map(str, answer["version"]))
        raise Refused(
            f"{python} is Python {version}, which the shim does not guard; 3.10 or newer is needed"
        )
    if "mlx_lm" in missing:
        raise Refused(
            f"{python} has no mlx_lm; give the interpreter of the environment that has it"
        )
    if "shim" in missing and known.is_ours:
        raise Refused(
            f"{python} has no shim;"
            f" install mlx-lm-shim there, or give {python} -m mlx_lm server ..."
        )
    if "wrapt" in missing:
        raise Refused(
            f"{python} has no wrapt, which most guards need:"
            f" {python} -m pip install 'wrapt>=1.16,!=2.2.0'"
        )
    site = answer["sitecustomize"]
    if site is None or Path(site).resolve().parent != ours.resolve():
        server.warnings.append(
            f"{python} finds {site or 'no sitecustomize'} first, not the one in {ours}"
        )


def _answer(python: str, environ: Mapping[str, str], workdir: str) -> dict[str, Any]:
    """Start the interpreter as the unit will, and ask what it can import. Raises Refused."""
    try:
        child = subprocess.run(
            [python, "-c", _ASK],
            env=environ,
            cwd=workdir,
            capture_output=True,
            check=False,
            timeout=_ASK_LIMIT,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise Refused(
            f"{python} did not answer within {_ASK_LIMIT} s whether it has mlx_lm"
        ) from None
    except OSError as error:
        raise Refused(f"{python} cannot be run in {workdir}: {error.strerror}") from None
    for line in child.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer
    said = (child.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
    raise Refused(
        f"{python} is not a Python that can run: status {child.returncode}, it said: {said[:200]}"
    )


def _check_files(server: Server, known: Invocation, environ: Mapping[str, str]) -> None:
    """Make paths of models and adapters absolute.

    A path must exist. A hub id should be in the cache.
    """
    arguments: Sequence[str] = server.argv[known.start :]
    for name, shortest in (MODEL, DRAFT, ADAPTER):
        found = option(arguments, name, shortest)
        if found is None:
            continue
        path = absolute(found[1])
        if found[1] and Path(path).exists():
            arguments = replace_option(arguments, found[0], path)
        elif name == ADAPTER[0] or not _HUB_ID.fullmatch(found[1]):
            raise Refused(
                f"{name} {found[1]!r} does not exist;"
                " accepted: a folder that exists, or an id of the hub"
            )
        elif local_model.in_cache(found[1], environ) is None:
            server.warnings.append(
                f"{name} {found[1]} is not in the cache of the hub: if it exists, the server"
                " downloads it at the first start, however long that takes"
            )
    server.argv[known.start :] = arguments
    if option(arguments, *MODEL) is None and not known.is_ours:
        server.warnings.append(
            "no --model: the server loads what requests name, and is healthy without a model"
        )


def _check_address(server: Server, known: Invocation) -> None:
    arguments = known.arguments
    host, port = option(arguments, *HOST), option(arguments, *PORT)
    server.host = host[1] if host else "127.0.0.1"
    given = port[1] if port else "8080"
    if not re.fullmatch(r"[0-9]{1,5}", given) or not 0 < int(given) <= _HIGHEST_PORT:
        raise Refused(
            f"--port {given[:20]!r} is not a port that clients can know;"
            f" accepted: 1 to {_HIGHEST_PORT}"
        )
    server.port = int(given)
    why = _why_not_free(server.host, server.port)
    if why:
        server.warnings.append(why)


def _why_not_free(host: str, port: int) -> str:
    """Say why the server could not listen there now; else the empty string."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(kind, socket.SOCK_STREAM) as asked:
            # The server sets it too.
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asked.bind(address)
            asked.listen(1)
    except socket.gaierror as error:
        return f"--host {host!r} is not an address of this machine: {error.strerror}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"port {port} is taken on {host}: while it is, the server exits 71 and is restarted"
                f" again and again; look with: lsof -nP -iTCP:{port} -sTCP:LISTEN"
            )
        return f"the server could not listen on {host}:{port}: {error.strerror}"
    return ""
