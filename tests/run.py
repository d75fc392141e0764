"""Makes what the tests need, once, and runs them.

    python3 tests/run.py [--quick | arguments of pytest]

--quick is for daily work. It runs the unit tests, and a test and a control of each guard, on the
newest line.

Each release of mlx-lm has a virtual environment in .venvs/, which is made again when its contents
change. The newest one also holds the test tools and runs them. Nothing here needs more than Python
3.11 and a package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from kit import releases
from kit.releases import NEWEST, REPO, VENVS, make, make_environment

# 0.31.3 and 0.32.2 are the two lines in use; 0.32.0 is asked about the leak.
LINES = ("0.31.3", "0.32.0", "0.32.2")
# Releases of wrapt the shim must refuse (1.15.0, 2.2.0), and old ones it must work with.
WRAPTS = ("1.15.0", "1.16.0", "1.17.3", "2.2.0")


def requirements(line: str) -> list[str]:
    wanted = releases.requirements(line)
    if line == NEWEST:
        project = tomllib.loads((REPO / "pyproject.toml").read_text())
        wanted += project["project"]["optional-dependencies"]["test"]
    return wanted


def prepare() -> Path:
    """Make every environment; return the Python that runs the tests."""
    for line in LINES:
        make_environment(VENVS / line, requirements(line))
    python = VENVS / NEWEST / "bin" / "python"
    for version in WRAPTS:
        folder = VENVS / f"wrapt-{version}"
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
            f"wrapt=={version}",
        ]
        make(folder, [f"wrapt=={version}"], [pip])
    return python


def main() -> int:
    python = str(prepare())
    environ = {
        k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("MLX_SHIM")
    }
    given = sys.argv[1:]
    whole = given in ([], ["--quick"])
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "-q", "."], ["mypy"]):
        if not whole:
            break
        print("$", *check, flush=True)
        subprocess.run([python, "-m", *check], cwd=REPO, env=environ, check=True)
    # More at a time than there are cores. Most of a test waits for a server, or for a fault that
    # must not appear.
    arguments = ["-n", "6", "--dist", "loadgroup", "--durations=15", *given] if whole else given
    return subprocess.run(
        [python, "-m", "pytest", *arguments], cwd=REPO, env=environ, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
