"""Measures what blocking_log costs a request (/health with it on and off, in turn) and a line.

A busy machine blurs the latency of requests, so it also prints the CPU that each one costs.

.venvs/0.32.2/bin/python tests/bench/blocking_log.py [pairs]
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil

from kit.harness import NEWEST, Server
from shim.cli import tiny_model
from shim.guards.blocking_log.stream import LogBuffer
from shim.guards.blocking_log.writer import Writer

REQUESTS = 100  # pairs of them for each pair of lines
LINES = 2000
LINE = '127.0.0.1 - - [01/Jan/2030 00:00:00] "GET /health HTTP/1.1" 200 -\n'


def request(server: Server) -> float:
    """Seconds a request."""
    start = time.perf_counter()
    server.get("/health")
    return time.perf_counter() - start


def requests(without: Server, guarded: Server, pairs: int) -> list[tuple[float, float]]:
    """One to each in turn, and each first as often as the other."""
    times = []
    for n in range(pairs):
        first, second = (without, guarded) if n % 2 else (guarded, without)
        one, other = request(first), request(second)
        times.append((one, other) if first is without else (other, one))
    return times


def cpu(server: Server) -> float:
    """Seconds that the server has computed."""
    times = psutil.Process(server.pid).cpu_times()
    return times.user + times.system


def lines(stream: io.TextIOWrapper) -> float:
    """Seconds a line."""
    start = time.perf_counter()
    write = stream.write
    for _ in range(LINES):
        write(LINE)
    return (time.perf_counter() - start) / LINES


def show(what: str, times: list[tuple[float, float]]) -> None:
    off, on = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    extra = statistics.median(b - a for a, b in times) * 1e6
    print(f"{what}: off {off:.1f} us, on {on:.1f} us, {extra:.1f} us more ({len(times)} pairs)")


def main() -> None:
    pairs = int(sys.argv[1]) if sys.argv[1:] else 40
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_model.make(folder / "model")
        off = {"MLX_SHIM_BLOCKING_LOG": "0"}
        with (
            Server(NEWEST, model, folder / "off", environ=off) as without,
            Server(NEWEST, model, folder / "on") as guarded,
        ):
            for server in (without, guarded):
                server.ready()
            requests(without, guarded, REQUESTS)
            before = cpu(without), cpu(guarded)
            count = pairs * REQUESTS
            show("a request", requests(without, guarded, count))
            off_cpu, on_cpu = (
                (cpu(server) - spent) / count * 1e6
                for server, spent in zip((without, guarded), before, strict=True)
            )
            print(f"of the server's CPU: off {off_cpu:.0f} us, on {on_cpu:.0f} us a request")

        text = {"encoding": "utf-8", "newline": "\n", "line_buffering": True}
        writer = Writer(
            os.open(folder / "lines on", os.O_WRONLY | os.O_CREAT), 64 << 20, lambda _: None
        )
        writer.start()
        with (folder / "lines off").open("w", buffering=1) as stock:
            ours = io.TextIOWrapper(LogBuffer(writer, None), **text)  # type: ignore[arg-type]
            times = []
            for _ in range(pairs):
                times.append((lines(stock), lines(ours)))
                writer.flush(10)
            show("a line", times)


main()
