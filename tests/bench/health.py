"""Measures the latency of /health under 64 streams, of the shim and of stock in one run.

.venvs/0.32.2/bin/python tests/bench/health.py [requests]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.harness import NEWEST, Server
from kit.streams import Stream
from shim.cli import tiny_model


def main() -> None:
    asks = int(sys.argv[1]) if sys.argv[1:] else 400
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_model.make(folder / "model")
        args = ("--decode-concurrency", "64", "--log-level", "ERROR")
        with (
            Server(NEWEST, model, folder / "stock", args=args, environ={"MLX_SHIM": "0"}) as stock,
            Server(NEWEST, model, folder / "ours", args=args) as ours,
        ):
            times: dict[str, list[float]] = {"stock": [], "ours": []}
            for server in (stock, ours):
                server.ready()
            streams = [
                Stream(s, {"prompt": f"{n} x", "max_tokens": 20_000})
                for n in range(64)
                for s in (stock, ours)
            ]
            time.sleep(5)
            for _ in range(asks):
                for name, server in (("stock", stock), ("ours", ours)):
                    start = time.perf_counter()
                    server.get("/health", timeout=60)
                    times[name].append(time.perf_counter() - start)
            alive = sum(stream.thread.is_alive() for stream in streams)
            for name, column in times.items():
                column.sort()
                p50, p99 = column[asks // 2], column[asks * 99 // 100]
                print(f"{name:6} p50 {p50 * 1e3:7.1f} ms, p99 {p99 * 1e3:7.1f} ms")
            ours_p99, stock_p99 = (times[name][asks * 99 // 100] for name in ("ours", "stock"))
            print(f"ratio of the p99s {ours_p99 / stock_p99:.2f}")
            print(f"{alive} of {len(streams)} streams still open at the end")


main()
