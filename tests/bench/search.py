"""Measures one look into the prompt cache, with the shim and with stock.

The cache holds one entry of so many tokens, and the prompt shares four of them. Run it after
tests/run.py has made the environments:

python3 tests/bench/search.py [pairs [tokens ...]]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.harness import LINES, REPO, clean_environ, python_of

OFF = {"MLX_SHIM_QUADRATIC_SEARCH": "0"}

SEARCH = """
import json, sys, time
import mlx_lm.server
from mlx_lm.models.cache import LRUPromptCache
entries = LRUPromptCache()
entries.insert_cache("model", [1, 2, 3, 4, *range(10, int(sys.argv[1]) + 6)], [])
start = time.perf_counter()
entries.fetch_nearest_cache("model", [1, 2, 3, 4, 5, 6])
print(json.dumps(time.perf_counter() - start))
"""


def once(line: str, tokens: int, environ: dict[str, str]) -> float:
    command = [python_of(line), "-c", SEARCH, str(tokens)]
    out = subprocess.run(
        command, capture_output=True, check=True, env=clean_environ(PYTHONPATH=str(REPO), **environ)
    )
    return float(json.loads(out.stdout))


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 3
    for line in LINES:
        for tokens in [int(text) for text in sys.argv[2:]] or [8_000, 32_000, 60_000, 120_000]:
            times = []
            for n in range(pairs):
                order = [OFF, {}] if n % 2 else [{}, OFF]
                found = {bool(environ): once(line, tokens, environ) for environ in order}
                times.append((found[True], found[False]))
            stock, ours = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(stock / ours for stock, ours in times)
            print(
                f"mlx-lm {line}, {tokens:>7,} tokens, {pairs} pairs: stock {stock:8.3f} s,"
                f" ours {ours * 1e3:6.1f} ms; stock takes {ratio:,.0f} times ours"
            )


main()
