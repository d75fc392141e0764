"""Runs both fuzzers, with another seed each time and as many examples as you like.

.venvs/0.32.2/bin/python tests/bench/fuzz.py [examples, 5000]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hypothesis import HealthCheck, given, settings

from kit.fuzz import Beside, bodies, judge, judge_wire, normal_texts, wires
from kit.harness import LINES, Server
from shim.cli import tiny_model


def run(line: str, model: Path, folder: Path, examples: settings) -> None:
    with Server(line, model, folder / f"stock{line}", environ={"MLX_SHIM": "0"}) as stock:
        wanted = normal_texts(stock.ready())
    statuses: Counter[int] = Counter()
    with Server(line, model, folder / line, environ={"MLX_SHIM_READ_TIMEOUT": "300ms"}) as server:

        @examples
        @given(bodies())
        def ask(item: tuple[str, bytes]) -> None:
            statuses[judge(server, *item)] += 1

        @examples
        @given(wires())
        def send(item: tuple[list[bytes], bool]) -> None:
            judge_wire(server, *item, patience=30)

        start = time.monotonic()
        with Beside(server.ready(), wanted) as beside:
            ask()
            send()
        assert server.get("/health")[1]["status"] == "ok"
        assert "Traceback" not in server.text()
        print(
            f"{line}: {dict(statuses)}, as many connections of raw bytes; {beside.rounds} rounds of"
            " four normal streams at the same time, with the tokens of stock;"
            f" {time.monotonic() - start:.0f} s; {server.get('/health')[1]['counters']}"
        )


def main() -> None:
    count = int(sys.argv[1]) if sys.argv[1:] else 5000
    examples = settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model.make(Path(scratch) / "model")
        for line in LINES:
            run(line, model, Path(scratch), examples)


main()
