"""`python -m shim path`: the folder to put on PYTHONPATH."""

from __future__ import annotations

import os
from pathlib import Path

HELP = "print the folder to put on PYTHONPATH"


def folder() -> Path:
    """The folder that holds the shim's sitecustomize.py.

    It is the checkout, or shim/inject where a wheel was installed.
    """
    package = Path(__file__).resolve().parents[1]
    inject = package / "inject"
    return inject if inject.is_dir() else package.parent


def pythonpath() -> str:
    """PYTHONPATH with the shim's folder first, then what was there before."""
    rest = [
        p
        for p in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if p and Path(p).resolve() != folder()
    ]
    return os.pathsep.join([str(folder()), *rest])


def main() -> int:
    print(folder())
    return 0
