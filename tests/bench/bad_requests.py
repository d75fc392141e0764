"""Prints what stock does with each bad request, the table in docs/bad-requests.md.

It takes about ten minutes.

.venvs/0.32.2/bin/python tests/bench/bad_requests.py
"""

from __future__ import annotations

import http.client
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from kit.bad_requests import CASES, Case
from kit.harness import LINES, Server
from shim.cli import tiny_model

# Seconds. An answer takes a tenth of one.
PATIENCE = 6.0


class Stock:
    """A stock server. It is started again whenever a request has ended it."""

    def __init__(self, line: str, model: Path, log: Path) -> None:
        self.line, self.model, self.log = line, model, log
        self.server: Server | None = None

    def fate(self, case: Case) -> str:
        """Send the request, and say what it gets and what becomes of the server."""
        server = self._running()
        try:
            status = server.post(case.raw, case.path, timeout=PATIENCE)[0]
            told = f"{status}"
        except TimeoutError:
            told = "no answer"
        except (OSError, http.client.HTTPException):
            told = "closed without an answer"
        ending = self._ending(server)
        return f"{told}; **{ending}**" if ending else told

    def close(self) -> None:
        if self.server is not None:
            self.server.__exit__()
            self.server = None

    def _running(self) -> Server:
        if self.server is None:
            self.server = Server(self.line, self.model, self.log, environ={"MLX_SHIM": "0"}).ready()
        return self.server

    def _ending(self, server: Server) -> str:
        try:
            served = (
                server.post(
                    {"prompt": "still there?", "max_tokens": 1, "seed": 1}, timeout=PATIENCE
                )[0]
                == 200
            )
        except (OSError, http.client.HTTPException):
            served = False
        if served:
            return ""
        code = server.process.poll()
        self.close()
        return "generation thread dead" if code is None else f"process dead, signal {-code}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.make(Path(folder) / "tiny")
        stocks = [Stock(line, model, Path(folder) / f"{line}.log") for line in LINES]
        print("| request | stock", " | stock ".join(LINES), "| with the shim |")
        print("|---" * (len(LINES) + 2) + "|")
        for case in CASES:
            fates = [stock.fate(case) for stock in stocks]
            print(f"| {case.name} |", " | ".join(fates), f"| {case.status} |", flush=True)
        for stock in stocks:
            stock.close()


if __name__ == "__main__":
    main()
