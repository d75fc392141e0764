"""`python -m shim`, and `mlx-lm-shim` where it is installed: one file a subcommand."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from .. import __version__


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a subcommand and exit with its status; 2 for a command line that it cannot read."""
    from . import doctor, path, probe, run, unit

    parser = argparse.ArgumentParser(
        prog="python -m shim", description="Keeps mlx_lm.server alive and honest."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help=run.HELP, add_help=False)
    told = commands.add_parser("doctor", help=doctor.HELP, allow_abbrev=False)
    told.add_argument("--model", help="a folder, or a Hugging Face repo that is in the local cache")
    commands.add_parser("path", help=path.HELP)
    probe.add_to(commands)
    for kind in unit.KINDS:
        commands.add_parser(kind, help=unit.HELP.format(kind), add_help=False)
    given = sys.argv[1:] if arguments is None else arguments
    # Everything after `run` belongs to mlx_lm.server, --help included.
    if given[:1] == ["run"]:
        sys.exit(run.main(given[1:]))
    if given and given[0] in unit.KINDS:
        sys.exit(unit.main(given[0], given[1:]))
    options = parser.parse_args(given)
    if options.command == "probe":
        sys.exit(probe.main(options))
    sys.exit(path.main() if options.command == "path" else doctor.main(options.model))
