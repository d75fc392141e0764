"""Deaths in a row under supervisord while openai clients ask all the time.

It measures what the clients get, and how soon after a death.
"""

from __future__ import annotations

import re
import socket
import statistics
import subprocess
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import openai

from kit.harness import (
    KILLER,
    NEWEST,
    REPO,
    VENVS,
    Inconclusive,
    Kept,
    clean_environ,
    free_port,
    python_of,
    wait_until,
)

# The ways in which a server is made to die.
RAISES, STALLS, KILLS = "RuntimeError", "sleep", "request"
CLIENTS = 8
# Seconds between two attempts to connect.
PROBE = 0.02
# Seconds, as a bound. About ten are usual.
PATIENCE = 120.0

SUPERVISORD = """
    [supervisord]
    nodaemon=true
    logfile={folder}/supervisord.log
    pidfile={folder}/supervisord.pid
"""
ENVIRON = {
    "MLX_SHIM_BAD_REQUEST": "0",
    "MLX_SHIM_KILLER_REQUEST": "0",
    "MLX_SHIM_DECODE_STALL": "1s",
    "MLX_SHIM_PREFILL_STALL": "3s",
    "MLX_SHIM_SELF_CHECK": "1",
    "MLX_SHIM_BLOCKING_LOG": "1",
}


def recipe(marker: str, page: str) -> str:
    """The block of the documentation that holds `marker`."""
    blocks = re.findall(
        r"^```\w*\n(.*?)^```$", (REPO / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )
    (found,) = [block for block in blocks if marker in block]
    return found


def configuration(
    folder: Path,
    line: str,
    model: Any,
    port: int,
    log: Path,
    *,
    hand_over: bool,
    environ: dict[str, str],
) -> str:
    """The file for supervisord: a unit from `python -m shim supervisord`, with `environ` in it."""
    command = [
        python_of(line),
        "-m",
        "mlx_lm",
        "server",
        "--model",
        str(model.path),
        "--port",
        str(port),
        *model.args,
    ]
    options = ["--log", str(log), *(["--socket"] if hand_over else [])]
    unit = subprocess.run(
        [python_of(NEWEST), "-m", "shim", "supervisord", *options, "--", *command],
        cwd=REPO,
        env=clean_environ(**environ),
        check=True,
        capture_output=True,
        text=True,
    )
    return textwrap.dedent(SUPERVISORD).format(folder=folder) + unit.stdout


class Supervised(Kept):
    """The server as a child of supervisord, with or without the socket handed over."""

    def __init__(
        self,
        line: str,
        model: Any,
        folder: Path,
        *,
        hand_over: bool,
        environ: dict[str, str] | None = None,
    ):
        folder.mkdir()
        self.sockets, self.port, self.line = [], free_port(), line
        self.model = model
        self.log = folder / "log"
        config = folder / "conf"
        environ = ENVIRON | (environ or {})
        unit = configuration(
            folder, line, model, self.port, self.log, hand_over=hand_over, environ=environ
        )
        config.write_text(self.configure(unit))
        command = [str(VENVS / NEWEST / "bin" / "supervisord"), "-c", str(config)]
        with (folder / "out").open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=clean_environ(**ENVIRON),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        assert wait_until(self.log.exists, 30), (folder / "out").read_text()

    def configure(self, text: str) -> str:
        """A test may override this to add to what supervisord reads."""
        return text

    @property
    def deaths(self) -> int:
        return self.text().count("mlx-lm-shim: fatal: ")

    def die(self, kind: str) -> None:
        """Make it die. A stall takes a while.

        The killer request is sent once, by a client that does not try again.
        """
        if kind == KILLS:
            self.send_and_leave(KILLER)
        else:
            whole = self.model.trigger.with_suffix(".whole")
            whole.write_text(kind)
            whole.rename(self.model.trigger)


class Client:
    """The real openai client, one request after another."""

    def __init__(self, port: int, number: int, stop: threading.Event, retries: int) -> None:
        # The time of each answer.
        self.answers: list[float] = []
        # Seconds of the longest request, its retries included.
        self.longest = 0.0
        self.errors: list[Exception] = []
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=retries,
            timeout=PATIENCE,
        )
        self._stop, self._number = stop, number
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            prompt = f"{self._number} {len(self.answers)}"
            try:
                done = self._client.completions.create(
                    model="default_model", prompt=prompt, max_tokens=10
                )
                assert done.usage and done.usage.completion_tokens == 10, done
                self.answers.append(time.monotonic())
            except (openai.OpenAIError, AssertionError) as error:
                self.errors.append(error)
                self._stop.wait(0.1)
            self.longest = max(self.longest, time.monotonic() - begun)


class Crowd:
    """Clients that ask all the time, and one that only connects."""

    def __init__(self, port: int, clients: int = CLIENTS, retries: int = 10) -> None:
        self.refused = 0
        self.probes = 0
        self._port, self._stop = port, threading.Event()
        self.clients = [Client(port, number, self._stop, retries) for number in range(clients)]
        self._prober = threading.Thread(target=self._probe, daemon=True)
        self._prober.start()

    def _probe(self) -> None:
        while not self._stop.wait(PROBE):
            self.probes += 1
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=30).close()
            except ConnectionRefusedError:
                self.refused += 1

    def answered_since(self, when: float) -> float | None:
        """The time of the first answer after `when`."""
        return min(
            (at for client in self.clients for at in list(client.answers)[-50:] if at > when),
            default=None,
        )

    def settle(self) -> None:
        """Wait until each client has had an answer from the server that lives now."""
        now = time.monotonic()

        def served() -> bool:
            return all(client.answers and client.answers[-1] > now for client in self.clients)

        assert wait_until(served, PATIENCE), [client.errors for client in self.clients]

    def stop(self) -> None:
        """Stop the clients, without waiting for their last requests."""
        self._stop.set()

    def leave(self) -> int:
        """Stop the clients, and return how many still wait for an answer."""
        self.stop()
        for client in self.clients:
            client.thread.join(PATIENCE)
        self._prober.join(PATIENCE)
        return sum(client.thread.is_alive() for client in self.clients)

    @property
    def errors(self) -> list[Exception]:
        return [error for client in self.clients for error in client.errors]

    @property
    def answers(self) -> int:
        return sum(len(client.answers) for client in self.clients)


def endure(server: Supervised, crowd: Crowd, kinds: list[str]) -> dict[str, list[float]]:
    """Make it die in these ways, one after another.

    Returns the seconds from each death to the next answer, by kind.
    """
    times: dict[str, list[float]] = {}
    for kind in kinds:
        crowd.settle()
        before = server.deaths
        server.die(kind)
        if not wait_until(lambda before=before: server.deaths > before, 60, 0.01):
            raise Inconclusive(f"no death by {kind}: {server.text()[-3000:]}")
        died = time.monotonic()
        # Answers from before the death may still arrive.
        last_words = died + 0.2
        assert wait_until(lambda since=last_words: crowd.answered_since(since), PATIENCE, 0.01), (
            crowd.errors
        )
        times.setdefault(kind, []).append((crowd.answered_since(last_words) or 0) - died)
    crowd.settle()
    return times


def table(times: dict[str, list[float]]) -> str:
    """The table of the documentation: deaths, and seconds to the next answer."""
    rows = ["| death by | deaths | median | max |", "|---|---|---|---|"]
    every = [seconds for column in times.values() for seconds in column]
    for kind, column in {**times, "all": every}.items():
        rows.append(
            f"| {kind} | {len(column)} | {statistics.median(column):.1f} s | {max(column):.1f} s |"
        )
    return "\n".join(rows)
