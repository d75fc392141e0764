"""The releases of mlx-lm in use, each with its mlx, and an environment for each of them.

This needs only Python 3.11 and a package index. MLX_LM_SHIM_TEST_RELEASES may name folders,
separated like those of PATH, with environments called RELEASE-PYTHON. An environment that holds
exactly what is wanted is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
VENVS = REPO / ".venvs"
# Oldest first, the same as in shim/cli/releases.py. 0.31.0 was withdrawn from PyPI, which still has
# it.
RELEASES = {
    "0.30.7": "0.30.6",
    "0.31.0": "0.31.0",
    "0.31.1": "0.31.1",
    "0.31.2": "0.31.2",
    "0.31.3": "0.32.0",
    # The oldest mlx that it takes.
    "0.32.0": "0.32.2",
    "0.32.1": "0.32.4",
    "0.32.2": "0.32.4",
}
NEWEST = "0.32.2"
WRAPT = "wrapt>=1.16,!=2.2.0"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Every release runs on this Python, or on the first that is found.
USUAL = "3.11"
# The last release for a Python. Without an entry it is the newest.
LAST_ON = {"3.10": "0.31.3"}

_ASK = """\
import importlib.metadata as m, json, sys
mlx_lm, mlx, wrapt = (m.version(name) for name in ("mlx-lm", "mlx", "wrapt"))
print(json.dumps([mlx_lm, mlx, "%d.%d" % sys.version_info[:2], wrapt]))
"""


@dataclass(frozen=True)
class Pair:
    """A release and the minor version of the Python to run it on."""

    release: str
    python: str

    def __str__(self) -> str:
        return f"{self.release}-{self.python}"


class NotHere(Exception):
    """An environment cannot be made on this machine. The message says why."""


def requirements(release: str) -> list[str]:
    mlx = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
    return [f"mlx-lm=={release}", f"{mlx}=={RELEASES[release]}", WRAPT]


def make(
    folder: Path, wanted: list[str], build: list[list[str]], version: str = sys.version
) -> None:
    """Run `build`, unless it has been run for exactly this, by the Python of that `version`.

    After a failure, the next call starts over.
    """
    stamp = hashlib.sha256(repr((version, wanted)).encode()).hexdigest()
    if (folder / "stamp").is_file() and (folder / "stamp").read_text() == stamp:
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder.relative_to(REPO)}: {' '.join(wanted)}", file=sys.stderr, flush=True)
    for command in build:
        subprocess.run(command, check=True, stdout=sys.stderr)
    (folder / "stamp").write_text(stamp)


def make_environment(folder: Path, wanted: list[str], interpreter: str = sys.executable) -> str:
    """Make a virtual environment of `interpreter` with these packages. Returns its Python."""
    python = str(folder / "bin" / "python")
    build = [
        [interpreter, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "-q", *wanted],
    ]
    make(folder, wanted, build, _say(interpreter, "import sys; print(sys.version)") or "")
    return python


def interpreters() -> dict[str, str]:
    """The Pythons of this machine by their minor version: those on PATH, then pyenv's."""
    found: dict[str, str] = {}
    for version in PYTHONS:
        named = shutil.which(f"python{version}")
        candidates = ([named] if named else []) + sorted(_pyenv(version), reverse=True)
        # The programs that pyenv puts on PATH fail where that version is not switched on.
        for path in candidates:
            said = _say(path, "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)")
            if said and said.split(" ", 1)[0] == version:
                found[version] = said.split(" ", 1)[1]
                break
    return found


def pairs(found: Iterable[str]) -> list[Pair]:
    """The pairs to run with these Pythons.

    Each release runs once, and each other Python runs the newest release that it takes.
    """
    usual = USUAL if USUAL in found else next(iter(found))
    others = [version for version in found if version != usual]
    wanted = [Pair(release, usual) for release in RELEASES]
    wanted += [Pair(LAST_ON.get(version, NEWEST), version) for version in others]
    return sorted(
        wanted, key=lambda pair: (list(RELEASES).index(pair.release), PYTHONS.index(pair.python))
    )


def python_of(pair: Pair, found: dict[str, str]) -> str:
    """The Python of an environment for this pair, made if there is none. Raises NotHere."""
    folders = [
        Path(f) for f in os.environ.get("MLX_LM_SHIM_TEST_RELEASES", "").split(os.pathsep) if f
    ]
    wanted = [pair.release, RELEASES[pair.release], pair.python]
    for folder in [*(f / str(pair) for f in folders), VENVS / pair.release]:
        python = str(folder.absolute() / "bin" / "python")
        if contents(python)[:3] == wanted:
            return python
    if pair.python not in found:
        raise NotHere(f"no Python {pair.python} here")
    try:
        return make_environment(
            VENVS / "releases" / str(pair), requirements(pair.release), found[pair.python]
        )
    except subprocess.CalledProcessError:
        raise NotHere(
            f"mlx-lm {pair.release} cannot be installed for Python {pair.python}"
        ) from None


def contents(python: str) -> list[str]:
    """Ask an environment for its versions of mlx-lm, mlx, Python and wrapt.

    Returns an empty list where one is missing.
    """
    said = _say(python, _ASK)
    return json.loads(said) if said else []


def _say(python: str, code: str) -> str | None:
    try:
        child = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return child.stdout.strip() if child.returncode == 0 else None


def _pyenv(version: str) -> list[str]:
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return []
    child = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
    return [
        str(p) for p in Path(child.stdout.strip() or "/").glob(f"versions/{version}.*/bin/python")
    ]
