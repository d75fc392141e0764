"""Measures how fast hybrid models decode, with the shim and with stock, and when stock would die.

It takes five pairs of 3,000 tokens, interleaved.

python3 tests/bench/hybrid.py [pairs]        (after tests/run.py has made the environments)
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.harness import LINES, NEWEST, REPO, clean_environ, python_of

FAMILIES = ("qwen3_next", "mamba2", "nemotron_h")
CAP = 499_000  # live Metal buffers
LAYERS = {
    "18 linear layers": 18,
    "Qwen3-Next-80B-A3B, 36": 36,
    "Qwen3.5, 48": 48,
    "mamba2-2.7b, 64": 64,
}
OFF = {"MLX_SHIM_LEAKING_ADVANCE": "0", "MLX_SHIM_LEAKING_OFFSET": "0"}

DECODE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from kit.families import build
from mlx_lm.generate import BatchGenerator
model = build(sys.argv[2])
generator = BatchGenerator(model)
generator.insert([[1, 2, 3, 4, 5]], max_tokens=[4000])
tokens = 0
while tokens < 100:
    tokens += len(generator.next()[1])
start, tokens = time.perf_counter(), 0
while tokens < 3000:
    tokens += len(generator.next()[1])
print(json.dumps((time.perf_counter() - start) / tokens))
"""


def once(line: str, family: str, environ: dict[str, str]) -> float:
    command = [python_of(line), "-c", DECODE, str(ROOT / "tests"), family]
    out = subprocess.run(
        command, capture_output=True, check=True, env=clean_environ(PYTHONPATH=str(REPO), **environ)
    )
    return float(json.loads(out.stdout))


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 5
    for family in FAMILIES:
        times = []
        for n in range(pairs):
            order = [OFF, {}] if n % 2 else [{}, OFF]
            found = {bool(environ): once(NEWEST, family, environ) for environ in order}
            times.append((found[True], found[False]))
        ratio = statistics.median(ours / stock for stock, ours in times)
        stock, ours = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        print(
            f"{family:12} {pairs} pairs of 3,000 tokens: stock {stock:.3f} ms a token,"
            f" ours {ours:.3f}; ratio {ratio:.3f}"
        )
    print(
        f"\nTokens of one completion until {CAP:,} buffers, at a buffer a token in each linear"
        f" layer but one ({', '.join(LINES)}):"
    )
    for name, layers in LAYERS.items():
        print(f"  {name:28} stock {CAP // (layers - 1):>8,}   ours: never")


main()
