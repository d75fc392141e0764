"""`python -m shim run [arguments of mlx_lm.server]`: start the stock server under the shim."""

from __future__ import annotations

import os
import re
import sys

from . import path, tiny_model

HELP = (
    "start mlx_lm.server under the shim; arguments are passed on unchanged, a tiny model is used if"
    " none is named"
)

# argparse of mlx_lm.server accepts --model and its abbreviations down to --mo, with or without
# =VALUE.
_MODEL = re.compile(r"--mo(d|de|del)?(=.*)?")


def main(arguments: list[str]) -> int:
    """Become the server. Where that is impossible, say why in a line and return 78."""
    if not any(_MODEL.fullmatch(a) or a in ("-h", "--help") for a in arguments):
        try:
            model = tiny_model.find_or_make()
        except ImportError as error:
            print(
                f"mlx-lm-shim: {error}; install the server: pip install mlx-lm"
                " (on Linux also mlx[cpu])",
                file=sys.stderr,
            )
            return 78
        # RuntimeError: mlx raises it for a full disk, pathlib for a missing home.
        except (OSError, RuntimeError) as error:
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
    # exec: the server takes over this process, so it gets the supervisor's signals and its exit
    # status is its own.
    return os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path.pythonpath()})
