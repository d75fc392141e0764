"""Makes the environments of the tests, once, and runs the tests.

python3 tests/run.py [arguments of pytest]

It makes one virtual environment in .venvs/ for each release of mlx-lm, and makes it again when its
requirements change. The newest one also holds the test tools and runs them. This needs only Python
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

# 0.31.3 and 0.32.2 are the two lines in use. The tests of the leak also need 0.32.0.
LINES = ("0.31.3", "0.32.0", "0.32.2")
# Releases of wrapt that the shim must refuse (1.15.0, 2.2.0), and old ones that must work.
WRAPTS = ("1.15.0", "1.16.0", "1.17.3", "2.2.0")


def requirements(line: str) -> list[str]:
    wanted = releases.requirements(line)
    if line == NEWEST:
        project = tomllib.loads((REPO / "pyproject.toml").read_text())
        wanted += project["project"]["optional-dependencies"]["test"]
    return wanted


def prepare() -> Path:
    """Make every environment. Returns the Python that runs the tests."""
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
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "-q", "."], ["mypy"]):
        # With arguments, only the tests that they name run.
        if sys.argv[1:]:
            break
        print("$", *check, flush=True)
        subprocess.run([python, "-m", *check], cwd=REPO, env=environ, check=True)
    # Four at a time on two cores: most of a test is waiting, for a server or for a fault.
    arguments = sys.argv[1:] or ["-n", "4", "--dist", "loadgroup", "--durations=15"]
    return subprocess.run(
        [python, "-m", "pytest", *arguments], cwd=REPO, env=environ, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
