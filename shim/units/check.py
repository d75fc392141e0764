"""Reads a unit of one of the three kinds, and says what in it defeats the shim."""

from __future__ import annotations

from pathlib import Path

from . import Refused, check_launchd, check_supervisord, check_systemd
from .findings import Finding, Findings

_LARGEST = 1_000_000  # bytes
_CHECKS = {
    "launchd": check_launchd.check,
    "systemd": check_systemd.check,
    "supervisord": check_supervisord.check,
}


def findings(kind: str, file: Path, folder: Path) -> list[Finding]:
    """Say what is wrong with `file`. PYTHONPATH must name `folder`.

    Raises Refused where the file is not of that kind.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST + 1)
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from None
    if len(raw) > _LARGEST:
        raise Refused(f"{file} is not a unit: it is larger than {_LARGEST} bytes")
    found = Findings(str(file))
    _CHECKS[kind](found, file, raw, folder)
    return sorted(found.found, key=lambda finding: not finding.defeats)
