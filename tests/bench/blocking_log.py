"""What the guard of the log costs a request: /health with it on and off, paired and interleaved; and one line alone.

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

from kit.harness import NEWEST, Server
from shim.cli import tiny_model
from shim.guards.blocking_log.stream import LogBuffer
from shim.guards.blocking_log.writer import Writer

BLOCK = 100  # requests of one measurement
LINES = 2000
LINE = '127.0.0.1 - - [01/Jan/2030 00:00:00] "GET /health HTTP/1.1" 200 -\n'


def block(server: Server) -> float:
    """Seconds a request."""
    start = time.perf_counter()
    for _ in range(BLOCK):
        server.get("/health")
    return (time.perf_counter() - start) / BLOCK


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
    print(
        f"{what}: off {off:.1f} us, on {on:.1f} us; the guard adds {extra:.1f} us ({len(times)} pairs)"
    )


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
                block(server)
            show("a request", [(block(without), block(guarded)) for _ in range(pairs)])

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
