"""The result of a case of tests/kit/drift/cases.py, partly read from the log: a row of a table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.drift.mutate import KINDS
from kit.harness import REPO
from shim.core.catalogue import GUARDS

PAGE = REPO / "docs" / "names.md"

_HEAD = """# Names of stock, taken away one at a time

Made on {date} by

    .venvs/0.32.2/bin/python tests/bench/drift.py

in {minutes:.0f} minutes, on Linux. Do not edit it: run that again. The names are those that the
shim wraps, looks up or reads, as it noted them itself. For each case a copy of mlx_lm was changed
throughout, as a release may change: the name renamed; its function with a further required
argument, with its result in another shape, or a generator; or its class, or function, moved to
another module. Then the server had to start and to serve the words that stock serves, the shim had
to tell a stall, a death had to end the process with 70, and no exception of the shim might reach
stock.

A cell is `death / stall`: the exit status, and whether the stall was `told`; `said` where it was
not told and a line at the start had said so. Empty: that change makes no sense for that name, or
http.server dictates it. In bold: not as it should be.

{cases} cases, {wrong} not as they should be, {lost} in which the heart was lost.

"""


@dataclass
class Row:
    """The result of one case."""

    line: str
    name: str
    kind: str
    served: bool = False
    stall: str = "-"
    death: str = "-"
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    log: str = ""

    def __str__(self) -> str:
        what = "; ".join(self.wrong) or "as it should be"
        return (
            f"{self.line} {self.name} {self.kind}: stall {self.stall}, death {self.death}:"
            f" {what}; said: {self.said}"
        )


def states(line: str) -> list[tuple[str, str, str]]:
    """(guard, state, reason) of the start-up line."""
    pattern = rf"\b({'|'.join(GUARDS)}) (\w+)( \(.*?\)(?=, (?:{'|'.join(GUARDS)}) |$))?"
    return [
        (name, kind, why or "")
        for name, kind, why in re.findall(pattern, line.partition("guards: ")[2])
    ]


def faults_of_ours(log: str) -> list[str]:
    """The tracebacks in a log that end in the shim or show one of its exceptions.

    Other lines may lie between the lines of a traceback.
    """
    found = []
    for block in log.split("Traceback (most recent call last):\n")[1:]:
        error = re.search(r"^[A-Za-z_][\w.]*(?:: .*)?$", block, re.MULTILINE)
        # The process ended while it printed the traceback.
        if error is None:
            continue
        traceback = block[: error.start()]
        frames = re.findall(r'^  File "(.*?)", line (\d+), in ', traceback, re.MULTILINE)
        what = error.group()
        ends_in_ours = frames and frames[-1][0].startswith(str(REPO / "shim"))
        if ends_in_ours or what.startswith(("shim.", "_mlx_lm_shim.")):
            at = f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else "?"
            found.append(f"an exception in {at}: {what[:150]}")
    return found


def page(rows: list[Row], seconds: float) -> str:
    """docs/names.md."""
    counts = {
        "wrong": sum(bool(row.wrong) for row in rows),
        "lost": sum("said" in (row.death, row.stall) for row in rows),
    }
    date = time.strftime("%Y-%m-%d")
    return (
        _HEAD.format(date=date, minutes=seconds / 60, cases=len(rows), **counts)
        + table(rows)
        + "\n"
    )


def table(rows: Iterable[Row]) -> str:
    """The Markdown table: a line for each name, a column for each kind of change."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        cell = f"{row.death} / {row.stall}"
        found.setdefault((row.line, row.name), {})[row.kind] = f"**{cell}**" if row.wrong else cell
    lines = ["| line | name | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for (line, name), cells in sorted(found.items()):
        lines.append(
            f"| {line} | `{name}` | " + " | ".join(cells.get(kind, "") for kind in KINDS) + " |"
        )
    return "\n".join(lines)
