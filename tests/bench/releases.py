"""Tries every release of mlx-lm in use, under the shim and with stock: docs/compatibility.md.

.venvs/0.32.2/bin/python tests/bench/releases.py [release ...]

Run it after tests/run.py has made that environment. It makes an environment for each release that
has none. With releases named, it runs only those and prints the page. Status 1 if the shim fails
anywhere.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import shim
from kit import releases
from kit.pages.compatibility import PAGE, Row, ask_doctor, page
from kit.releases import NotHere, Pair
from kit.scenarios import SCENARIOS, Scenario, Stage

# Scenarios at the same time, on two cores: most of a scenario is waiting.
AT_ONCE = 5


def environments(only: list[str]) -> tuple[dict[Pair, str], list[str]]:
    """Make the environments. Returns the Python of each, and says what is missing here."""
    found = releases.interpreters()
    pythons: dict[Pair, str] = {}
    absent = [f"no Python {version} here" for version in releases.PYTHONS if version not in found]
    for pair in releases.pairs(found):
        if only and pair.release not in only:
            continue
        try:
            pythons[pair] = releases.python_of(pair, found)
        except NotHere as why:
            absent.append(str(why))
    return pythons, absent


def run(pythons: dict[Pair, str], folder: Path) -> list[Row]:
    rows = {
        pair: Row(pair, releases.contents(python)[1], ask_doctor(python))
        for pair, python in pythons.items()
    }

    def job(name: str, pair: Pair, side: str, scenario: Scenario, stage: Stage) -> None:
        seen = scenario.play(stage)
        getattr(rows[pair], side).update(seen)
        print(f"{pair} {side:5} {name}: {seen}", file=sys.stderr, flush=True)

    jobs = []
    for (name, scenario), pair, side in itertools.product(
        SCENARIOS.items(), pythons, ("stock", "shim")
    ):
        where = folder / str(pair) / side / name.replace(" ", "-")
        stage = scenario.stage(pythons[pair], where, guarded=side == "shim")
        jobs.append((name, pair, side, scenario, stage))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(job, *each) for each in jobs]:
            done.result()
    return list(rows.values())


def main() -> int:
    only = sys.argv[1:]
    started = time.monotonic()
    pythons, absent = environments(only)
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(pythons, Path(scratch))
    system = f"{platform.system()} {platform.machine()} with {os.cpu_count()} cores"
    text = page(rows, absent, shim.__version__, system, time.monotonic() - started)
    if only:
        print(text)
    else:
        PAGE.write_text(text)
    return 1 if any("NO" in row.cells() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
