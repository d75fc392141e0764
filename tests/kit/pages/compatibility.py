"""docs/compatibility.md: tests/bench/releases.py writes it with this, and a test reads it."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kit.harness import REPO, clean_environ
from kit.scenarios import COLUMNS, Seen, cell

if TYPE_CHECKING:
    from kit.releases import Pair

PAGE = REPO / "docs" / "compatibility.md"
# With these guards a server ends instead of becoming a zombie, tells its clients, answers /health,
# and can be stopped.
HEART = (
    "generation_death",
    "endless_wait",
    "stall",
    "wrong_status",
    "untruthful_health",
    "abrupt_stop",
    "killer_request",
    "bad_request",
    "abandoned_request",
    "orphaned_process",
    "frozen_interpreter",
    "leaking_advance",
)
CELL = re.compile(r"yes|NO|not affected|not tried \(.+\)")
_GUARD = re.compile(r"  (\w+) +([a-z]+)(?: \((.*)\))?")
_INTRO = """\
# Releases in use

Made on {date} by

    .venvs/0.32.2/bin/python tests/bench/releases.py

with mlx-lm-shim {version}, in {minutes:.0f} minutes, on {system}. Do not edit it: run that again.
Each release ran in its own environment, with the stock `mlx_lm.server` and a tiny model whose
forward pass can be told to misbehave. [What is not verified](not-verified.md) on a Mac is not \
verified
here either.

## What was seen

Each scenario ran twice: under the shim, and with `MLX_SHIM=0` as the control. `yes`: stock shows
the fault, and the shim does what it promises. `NO`: the shim does not do it. `not affected`: stock
shows no fault in that release, so the run only proves that the shim does no harm. The rows `stock`
and `shim` say what was seen.

* death: the generation thread raises. The process must end with 70.
* clients told: at that death, a running stream ends with an error event and a request that waits
  gets 503.
* stall: the forward pass never returns. The process must end with 70 once the limit, 3 s here, is
  over.
* health: `/health` is not 200 while the model loads, while nothing is generated (and 200 again
  after that), and when the generation thread is dead. Under the shim the process is kept from
  ending for it.
* SIGTERM drains: the running stream is finished, and the status is 0.
* the leak: the bytes that 20,000 calls of `ArraysCache.advance` leave behind.
* empty prompt, stop that is no word, top_k out of range: `{{"prompt": ""}}`, `{{"stop": [1]}}` and
  a `top_k` above the vocabulary get 400 each, a stream at the same time is finished, and the server
  goes on.
"""
_GUARDS = """
## Guards of the heart

What `python -m shim doctor` says in each environment, in the words of
[how it works](how-it-works.md#guards).
"""
_LOST = """
## What is lost where

Guards that do not work there, with the reason they give, and those that are not needed there. All
others are at work, or off unless a setting asks for them.
"""


@dataclass
class Row:
    """One release on one Python: its versions, the states of its guards, and what was seen."""

    pair: Pair
    mlx: str = ""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    stock: dict[str, Seen | str] = field(default_factory=dict)
    shim: dict[str, Seen | str] = field(default_factory=dict)

    def cells(self) -> list[str]:
        return [cell(self.stock.get(column), self.shim.get(column)) for column in COLUMNS]

    def words(self, side: dict[str, Seen | str]) -> list[str]:
        seen = [side.get(column, "") for column in COLUMNS]
        return [x.what if isinstance(x, Seen) else x.replace("|", "/") for x in seen]


def ask_doctor(python: str) -> dict[str, tuple[str, str]]:
    """State and reason of each guard, as the doctor prints them there."""
    child = subprocess.run(
        [python, "-m", "shim", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPO,
        env=clean_environ(PYTHONPATH=str(REPO)),
    )
    guards = child.stdout.partition("\nguards\n")[2].partition("\n\n")[0]
    found = [match.groups() for match in map(_GUARD.fullmatch, guards.splitlines()) if match]
    return {name: (kind, reason or "") for name, kind, reason in found}


def page(rows: list[Row], absent: list[str], version: str, system: str, seconds: float) -> str:
    """The text of the page. `absent` says what was not run, and why."""
    intro = _INTRO.format(
        date=time.strftime("%Y-%m-%d"), version=version, minutes=max(1, seconds / 60), system=system
    )
    missing = ["", *(f"* not run: {text}" for text in absent)] if absent else []
    return (
        "\n".join([intro, *_seen(rows), *missing, _GUARDS, *_states(rows), _LOST, *_lost(rows)])
        + "\n"
    )


def _seen(rows: list[Row]) -> list[str]:
    lines = _head("mlx-lm", "mlx", "Python", "", *COLUMNS)
    for row in rows:
        lines.append(_line(row.pair.release, row.mlx, row.pair.python, "", *row.cells()))
        lines += [
            _line("", "", "", side, *row.words(getattr(row, side))) for side in ("stock", "shim")
        ]
    return lines


def _states(rows: list[Row]) -> list[str]:
    lines = _head("mlx-lm", "Python", *(f"`{name}`" for name in HEART))
    for row in rows:
        kinds = [row.states.get(name, ("unknown", ""))[0] for name in HEART]
        lines.append(_line(row.pair.release, row.pair.python, *kinds))
    return lines


def _lost(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        lines += [f"### mlx-lm {row.pair.release}, Python {row.pair.python}", ""]
        lost = {n: s for n, s in row.states.items() if s[0] not in ("active", "retired", "off")}
        spared = {n: s for n, s in row.states.items() if s[0] == "retired"}
        lines += [f"* `{name}` is {kind}: {reason}" for name, (kind, reason) in lost.items()] or [
            "* nothing is lost"
        ]
        lines += [f"* `{name}` is not needed: {reason}" for name, (_, reason) in spared.items()]
        lines.append("")
    return lines[:-1]


def _head(*cells: str) -> list[str]:
    return [_line(*cells), _line(*("---" for _ in cells))]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each table of the page as a list of rows, each a dictionary by the table's head."""
    found, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append([part.strip() for part in line.strip("|").split("|")])
        elif block:
            head, _, *body = block
            found.append([dict(zip(head, cells, strict=True)) for cells in body])
            block = []
    return found
