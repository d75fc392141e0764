"""Measures what the ledger costs a token: `put` on the shim's response queue and on queue.Queue.

The measurements are paired and interleaved.

python3 tests/bench/ledger.py [pairs]
"""

from __future__ import annotations

import queue
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shim.engine import queues
from shim.engine.state import engine

TOKENS = 20_000


class Token:
    pass


def once(responses: queue.Queue[Any]) -> float:
    token = Token()
    start = time.perf_counter()
    for _ in range(TOKENS):
        responses.put(token)
    return (time.perf_counter() - start) / TOKENS


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 20
    times = []
    for _ in range(pairs):
        stock = once(queue.Queue())
        ours = once(queues.ResponseQueue(engine.open((), None), Token))
        times.append((stock, ours))
    base, with_ledger = (statistics.median(column) for column in zip(*times, strict=True))
    extra = statistics.median(b - a for a, b in times)
    print(
        f"put, median of {pairs} pairs of {TOKENS}: queue.Queue {base * 1e9:.0f} ns,"
        f" ours {with_ledger * 1e9:.0f} ns"
    )
    print(f"the ledger adds {extra * 1e9:.0f} ns a token; ratio {with_ledger / base:.2f}")


main()
