"""Plays a death, a stall, a drain and other faults on a real server of any release of mlx-lm.

Each scenario runs on a stage (an interpreter, a model, with or without the shim) and tells what it
saw, by column. With stock it is its own control: where stock shows no fault, the shim proves
nothing.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import FaultyModel
from kit.harness import KILLER, REPO, Server, clean_environ, free_port, wait_until
from kit.streams import Stream

# Seconds to wait for stock, which usually never does it.
PATIENCE = 6.0
# Seconds within which the shim must do it. A bound, not a measurement.
ENOUGH = 30.0
SHORT = {
    "MLX_SHIM_DECODE_STALL": "3s",
    "MLX_SHIM_PREFILL_STALL": "4s",
    "MLX_SHIM_EXIT_GRACE": "10s",
}
LET_IN = {"MLX_SHIM_BAD_REQUEST": "0", "MLX_SHIM_KILLER_REQUEST": "0"}
LONG = {"prompt": "x", "max_tokens": 100_000}


@dataclass(frozen=True)
class Seen:
    """Whether it went well, and what was seen, in words."""

    good: bool
    what: str


_taking_a_port = threading.Lock()


@dataclass(frozen=True)
class Stage:
    """Where a scenario runs.

    It is made in the main thread: MLX makes the model, and may fail when another thread ends.
    """

    python: str
    folder: Path
    model: FaultyModel
    guarded: bool

    def server(self, **environ: str) -> Server:
        with _taking_a_port:
            port = free_port()
        switch: dict[str, str | None] = {} if self.guarded else {"MLX_SHIM": "0"}
        environment = SHORT | environ | switch
        log = self.folder / "log"
        return Server(
            self.python, self.model.path, log, args=self.model.args, environ=environment, port=port
        )

    @property
    def patience(self) -> float:
        return ENOUGH if self.guarded else PATIENCE

    def wait_end(self, server: Server) -> int | None:
        """Wait, and return the exit status, or None where the server lives on."""
        wait_until(lambda: not server.alive, self.patience)
        return server.process.poll()


@dataclass(frozen=True)
class Scenario:
    """The columns it fills, how it runs, and what goes wrong in the model."""

    columns: tuple[str, ...]
    see: Callable[[Stage], dict[str, Seen]]
    fault: dict[str, object]

    def stage(self, python: str, folder: Path, *, guarded: bool) -> Stage:
        folder.mkdir(parents=True)
        return Stage(python, folder, FaultyModel(folder / "model", **self.fault), guarded)

    def play(self, stage: Stage) -> dict[str, Seen | str]:
        """Run it. Returns what was seen by column, or why nothing could be."""
        try:
            return dict(self.see(stage))
        except Exception as error:
            return dict.fromkeys(self.columns, (" ".join(str(error).split()) or repr(error))[:80])


class Asked:
    """A request that waits in its own thread. Status 0: there was no answer."""

    def __init__(self, server: Server, body: dict[str, Any], timeout: float = ENOUGH) -> None:
        self.status, self.answer = 0, None
        self.thread = threading.Thread(target=self._ask, args=(server, body, timeout), daemon=True)
        self.thread.start()

    def _ask(self, server: Server, body: dict[str, Any], timeout: float) -> None:
        try:
            self.status, self.answer = server.post(body, timeout=timeout)
        except (OSError, http.client.HTTPException):
            pass

    def what(self) -> str:
        self.thread.join(2)
        return "no answer yet" if self.thread.is_alive() else str(self.status or "cut off")


def death(stage: Stage) -> dict[str, Seen]:
    """The generation thread raises, while one stream runs and one request waits its turn."""
    with stage.server() as server:
        stream = Stream(server.ready(), LONG, timeout=ENOUGH)
        assert stream.first.wait(ENOUGH)
        waiting = Asked(server, {"prompt": "y", "seed": 1, "max_tokens": 5})
        time.sleep(0.5)
        stage.model.fire()
        status = stage.wait_end(server)
        what = f"exit {status}"
        if status is None:
            what = "zombie" if server.is_zombie() else "lives and serves"
        told = _how_it_ended(stream), waiting.what()
        return {
            "death": Seen(
                status == 70 if stage.guarded and status is not None else what != "zombie", what
            ),
            "clients told": Seen(
                told == ("error event", "503"), f"stream: {told[0]}; waiting: {told[1]}"
            ),
        }


def _how_it_ended(stream: Stream) -> str:
    stream.thread.join(2)
    if stream.thread.is_alive():
        return "hangs"
    last = [line for line in stream.lines if line.startswith("data: {")][-1:]
    if last and "error" in json.loads(last[0][6:]):
        return "error event"
    return "looks complete" if stream.done else "cut off"


def stall(stage: Stage) -> dict[str, Seen]:
    """A forward pass never returns."""
    with stage.server() as server:
        stream = Stream(server.ready(), LONG, timeout=ENOUGH)
        assert stream.first.wait(ENOUGH)
        stage.model.fire()
        status = stage.wait_end(server)
        good = status == 70 if stage.guarded else status is not None
        return {"stall": Seen(good, "hangs" if status is None else f"exit {status}")}


def health(stage: Stage) -> dict[str, Seen]:
    """What /health says while the model loads, during a stall, and after a death.

    Under the shim the process is kept from ending, so that it can answer.
    """
    seen = {}
    kept = {"MLX_SHIM_ON_STALL": "dump", "MLX_SHIM_GENERATION_DEATH": "0"}
    with stage.server(**kept, **LET_IN) as server:
        assert wait_until(lambda: stage.model.loaded.exists() or not server.alive, 3 * ENOUGH), (
            "no model is loaded"
        )
        wait_until(lambda: _health(server) != "refused", PATIENCE / 2)
        seen["health: loading"] = _truthful(stage, _health(server), "loading")
        stage.model.hurry()
        server.ready()
        stage.model.take_its_time()
        stream = Stream(server, LONG, timeout=ENOUGH)
        assert stream.first.wait(ENOUGH)
        stage.model.fire()
        wait_until(lambda: _health(server) != "200", stage.patience)
        told = _health(server)
        stage.model.trigger.unlink()
        after = "200" if wait_until(lambda: _health(server) == "200", PATIENCE) else _health(server)
        seen["health: stalled"] = Seen(
            told.startswith("503") and after == "200", f"{told}, then {after}"
        )
        server.send_and_leave(KILLER)
        wait_until(lambda: _health(server) != "200", stage.patience)
        seen["health: dead"] = _truthful(stage, _health(server), "dead")
        if seen["health: dead"].what == "200" and not server.is_zombie():
            raise AssertionError("the request that should kill it did not")
    return seen


def _truthful(stage: Stage, told: str, word: str) -> Seen:
    """Judge what /health told. For stock, anything but 200 is good.

    A refused connection is good too: it says nothing wrong.
    """
    return Seen(told in (f"503 {word}", "refused") if stage.guarded else told != "200", told)


def _health(server: Server) -> str:
    """The status, with the shim's word for it."""
    try:
        status, body = server.get("/health", timeout=5)
    except (OSError, http.client.HTTPException):
        return "refused"
    word = body.get("status") if isinstance(body, dict) else None
    return f"{status} {word}" if word not in (None, "ok") else str(status)


def drain(stage: Stage) -> dict[str, Seen]:
    """SIGTERM, while a stream runs that takes some seconds more."""
    with stage.server() as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 60}, timeout=ENOUGH)
        assert stream.first.wait(ENOUGH)
        server.process.send_signal(signal.SIGTERM)
        status = stage.wait_end(server)
        stream.thread.join(2)
        what = "stream finished" if stream.done else "stream cut off"
        return {"SIGTERM drains": Seen(status == 0 and stream.done, f"exit {status}, {what}")}


def poison(body: dict[str, Any], column: str) -> Scenario:
    """A request that stock dies of, at the same time as a stream that is independent of it."""

    def see(stage: Stage) -> dict[str, Seen]:
        with stage.server() as server:
            stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 60}, timeout=ENOUGH)
            assert stream.first.wait(ENOUGH)
            asked = Asked(server, body)
            asked.thread.join(stage.patience)
            stream.thread.join(stage.patience)
            lives = not server.is_zombie() and server.alive
            told = asked.what()
            what = f"{told}, {'lives' if lives else 'zombie' if server.alive else 'ended'}"
            return {column: Seen(told == "400" and lives and stream.done, what)}

    return Scenario((column,), see, {"kind": "none", "delay": 0.03})


_ADVANCES = """\
import sys
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
CALLS = 20_000
cache = ArraysCache(2, left_padding=[3, 0])
cache.prepare(lengths=[CALLS, CALLS])
mx.eval(cache.left_padding, cache.lengths)
before = mx.get_active_memory()
for _ in range(CALLS):
    cache.advance(1)
print((mx.get_active_memory() - before) / CALLS)
"""


def leak(stage: Stage) -> dict[str, Seen]:
    """The cache of a linear attention layer, advanced 20,000 times with two of its fields set."""
    environ = clean_environ(PYTHONPATH=str(REPO), **({} if stage.guarded else {"MLX_SHIM": "0"}))
    child = subprocess.run(
        [stage.python, "-c", _ADVANCES],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        cwd=stage.folder,
    )
    if child.returncode:
        raise AssertionError((child.stderr.splitlines() or ["no ArraysCache"])[-1])
    grown = float(child.stdout.split()[-1])
    return {"the leak": Seen(grown <= 0, f"{grown:g} bytes a token")}


SCENARIOS = {
    "death": Scenario(("death", "clients told"), death, {"kind": "RuntimeError", "delay": 0.03}),
    "stall": Scenario(("stall",), stall, {"kind": "sleep", "delay": 0.02}),
    "health": Scenario(
        ("health: loading", "health: stalled", "health: dead"),
        health,
        {"kind": "sleep_while_triggered", "delay": 0.02, "load_delay": 10 * ENOUGH},
    ),
    "drain": Scenario(("SIGTERM drains",), drain, {"kind": "none", "delay": 0.05}),
    "leak": Scenario(("the leak",), leak, {"kind": "none"}),
    "empty prompt": poison({"prompt": ""}, "empty prompt"),
    "stop that is no word": poison(KILLER, "stop that is no word"),
    "top_k out of range": poison(
        {"prompt": "x", "top_k": 10**6, "temperature": 0.5}, "top_k out of range"
    ),
}
COLUMNS = tuple(column for scenario in SCENARIOS.values() for column in scenario.columns)


def cell(stock: Seen | str | None, shim: Seen | str | None) -> str:
    """`yes`, `NO`, `not affected` or `not tried (why)`: the shim's result compared with stock's."""
    if not isinstance(stock, Seen):
        return f"not tried (with stock: {stock or 'not seen'})"
    if not isinstance(shim, Seen) or not shim.good:
        return "NO"
    return "not affected" if stock.good else "yes"
