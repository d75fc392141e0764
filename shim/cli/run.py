"""`python -m shim run [arguments of mlx_lm.server]`: the stock server of this interpreter, under the shim."""

from __future__ import annotations

import os
import re
import sys

from . import path, tiny_model

HELP = "start mlx_lm.server under the shim; arguments are passed on unchanged, a tiny model is used if none is named"

# argparse, in mlx_lm.server, accepts --model, its abbreviations down to --mo, and either with =VALUE.
_MODEL = re.compile(r"--mo(d|de|del)?(=.*)?")


def main(arguments: list[str]) -> int:
    """Become the server. Returns, with a status, only where that is impossible: 78, and a line that says why."""
    if not any(_MODEL.fullmatch(a) or a in ("-h", "--help") for a in arguments):
        try:
            model = tiny_model.cached()
        except ImportError as error:
            print(
                f"mlx-lm-shim: {error}; install the server: pip install mlx-lm (on Linux also mlx[cpu])",
                file=sys.stderr,
            )
            return 78
        except (
            OSError,
            RuntimeError,
        ) as error:  # mlx and pathlib raise RuntimeError for a full disk, or no home
            print(
                f"mlx-lm-shim: the tiny model cannot be made: {error}; name a model with --model",
                file=sys.stderr,
            )
            return 78
        print(
            f"mlx-lm-shim: no --model given: serving a tiny random model, {model}; it talks noise",
            file=sys.stderr,
        )
        arguments = ["--model", str(model), *arguments]
    command = [sys.executable, "-m", "mlx_lm", "server", *arguments]
    # exec, so that a supervisor's signals and the exit status are the server's own
    return os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path.pythonpath()})
