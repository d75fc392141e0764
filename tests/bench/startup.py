"""Measures what the shim costs a Python that is not a server: `python -c pass`, with and without.

The measurements are paired and interleaved.

python3 tests/bench/startup.py [pairs]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def once(environ: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True, env=environ)
    return time.perf_counter() - start


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 40
    without = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    under = without | {"PYTHONPATH": str(REPO)}
    # To be fair, PYTHONPATH names a folder in both cases: every import looks into each folder.
    empty = without | {"PYTHONPATH": str(REPO / "docs")}
    for environ in (empty, under, empty, under):
        # Compiles the byte code and brings the files into memory.
        once(environ)
    times = [
        (once(empty), once(under)) if n % 2 else (once(under), once(empty))[::-1]
        for n in range(pairs)
    ]
    base, ours = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"python -c pass, median of {pairs} pairs: without {base * 1e3:.2f} ms,"
        f" with {ours * 1e3:.2f} ms"
    )
    difference = statistics.median(b - a for a, b in times)
    print(f"median of the paired differences {difference * 1e3:+.2f} ms; ratio {ours / base:.3f}")


main()
