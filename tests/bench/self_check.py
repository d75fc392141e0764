"""What MLX_SHIM_SELF_CHECK adds to a start, and what it takes from the first request.

Servers with and without it take turns.

.venvs/0.32.2/bin/python tests/bench/self_check.py [starts] [arguments of the server]
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.harness import LINES, Server, wait_until
from shim.cli import tiny_model

ENVIRON = {"MLX_SHIM_DEBUG": "1"}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def one(line: str, model: Path, log: Path, switch: str, args: tuple[str, ...]) -> tuple[float, ...]:
    """Seconds until /health says ok, of the first chat, of the second, and of the self-check."""
    begun = time.perf_counter()
    with Server(
        line, model, log, args=args, environ=ENVIRON | {"MLX_SHIM_SELF_CHECK": switch}
    ) as server:

        def is_ok() -> bool:
            try:
                return server.get("/health")[0] == 200
            except OSError:
                return False

        assert wait_until(is_ok, 120, step=0.005), server.text()
        times = [time.perf_counter() - begun]
        for n in range(2):
            ask = CHAT | {"messages": [{"role": "user", "content": f"{n} hello"}]}
            begun = time.perf_counter()
            assert server.post(ask, "/v1/chat/completions")[0] == 200
            times.append(time.perf_counter() - begun)
        took = re.findall(r"the self-check took ([\d.]+) s", server.text())
    return (*times, float(took[-1]) if took else 0.0)


def main() -> None:
    starts = int(sys.argv[1]) if sys.argv[1:] else 7
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_model.make(folder / "model")
        for line in LINES:
            rows: dict[str, list[tuple[float, ...]]] = {"0": [], "1": []}
            for n in range(starts):
                for switch in ("01", "10")[n % 2]:
                    rows[switch].append(
                        one(line, model, folder / f"{line}-{switch}-{n}", switch, (*sys.argv[2:],))
                    )
            for switch, name in (("0", "without"), ("1", "with")):
                medians = (statistics.median(column) for column in zip(*rows[switch], strict=True))
                start, first, second, took = (1e3 * seconds for seconds in medians)
                print(
                    f"{line} {name:7} start {start:6.0f} ms, first chat {first:6.1f} ms, "
                    f"second {second:6.1f} ms, the self-check {took:6.1f} ms"
                )


main()
