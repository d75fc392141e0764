"""What becomes of the heart of the shim when a name of stock changes. Each case is a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from conftest import FaultyModel
from kit.drift import mutate, stock_package
from kit.drift.report import Row, faults_of_ours, states
from kit.drift.server import Drifted, lay_out, package_of
from kit.harness import (
    KILLER,
    REPO,
    Inconclusive,
    clean_environ,
    expect_zombie,
    python_of,
    wait_until,
)
from kit.pages import wrapping
from kit.streams import Stream
from shim.core.catalogue import GUARDS

# Without these guards, a death or a hang is not told, or told wrongly.
HEART = (
    "generation_death",
    "stall",
    "endless_wait",
    "untruthful_health",
    "abrupt_stop",
    "frozen_interpreter",
    "abandoned_request",
)
# Cases at the same time: most of a case is waiting.
AT_ONCE = 4
FIXED = {"prompt": "The quick brown", "max_tokens": 8, "temperature": 0}
# A changed server must answer these like stock too. One of them, or the start, or the load uses
# each name.
CHAT = {
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    "max_tokens": 8,
}
OTHERS = {
    "alone": ("/v1/chat/completions", CHAT | {"seed": 1}),
    "in a batch": (
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 3, "repetition_penalty": 1.1},
    ),
    "again": ("/v1/chat/completions", CHAT),
}
TOLD_WITHIN = 20.0
ENDED_WITHIN = 5.0

_LISTS = """
import json, mlx_lm.server, sys
from shim.core.verdicts import touched
json.dump(sorted(touched), sys.stdout)
"""


def touched(line: str, folder: Path, guards: Iterable[str] = GUARDS) -> list[tuple[str, str]]:
    """Every name of stock that these guards and the observers look up, with every setting on."""
    off = {f"MLX_SHIM_{name.upper()}": "0" for name in GUARDS if name not in guards}
    environ = clean_environ(**wrapping.every_setting(folder) | off, PYTHONPATH=str(REPO))
    listed = subprocess.run(
        [python_of(line), "-c", _LISTS], env=environ, capture_output=True, check=True, text=True
    )
    return [
        (module, path)
        for module, path in json.loads(listed.stdout)
        if module.split(".")[0] == "mlx_lm"
    ]


SERVER = "mlx_lm.server"
# Module, path, kind.
Case = tuple[str, str, str]


def cases(names: Iterable[tuple[str, str]], kinds: Iterable[str]) -> list[Case]:
    """Each case once. The class of a name is a name too."""
    result = {}
    for module, path in names:
        for kind in kinds:
            for changed in {path.partition(".")[0], mutate.subject(path, kind)}:
                result[module, changed, kind] = None
    return sorted(result)


class Bench:
    """What the cases of one line have in common: its sources, a model, and the text stock makes."""

    def __init__(self, line: str, folder: Path) -> None:
        self.line, self.folder = line, folder
        self.sources = stock_package.read(package_of(line))
        self.model = FaultyModel(folder / "model", kind="sleep_while_triggered", delay=0.02)
        self._made = 0

    @cached_property
    def stock_answers(self) -> dict[str, Any]:
        with self._server(self._folder(), None, MLX_SHIM="0") as server:
            return _answers(server.ready())

    def run_all(
        self, wanted: Iterable[Case], run: Callable[..., Row | None] | None = None
    ) -> list[Row]:
        """Run the cases. Returns the rows of those that make sense."""
        _ = self.stock_answers
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [
                row
                for row in pool.map(lambda case: (run or self.run)(*case), wanted)
                if row is not None
            ]

    def run_each(self, attributes: Iterable[str]) -> list[Row | None]:
        """Run a case for each attribute of the generator."""
        _ = self.stock_answers
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.run_attribute, attributes))

    def run(self, module: str, path: str, kind: str) -> Row | None:
        changed = mutate.mutate(self.sources, module, path, kind)
        return None if changed is None else self.run_changed(module, path, kind, changed)

    def run_attribute(self, name: str) -> Row | None:
        """Rename an attribute of the server's generator throughout.

        Returns None where the release does not have it.
        """
        source = self.sources[SERVER]
        # Only after a dot: a keyword of the same name is another thing.
        changed = re.sub(rf"(?<=\.){name}\b(?!=[^=])", f"{name}_renamed", source)
        changed = re.sub(rf"\bdef {name}\b", f"def {name}_renamed", changed)
        # The responses of a batch have an attribute of the same name.
        changed = re.sub(r"\br\.prompt_cache_renamed\b", "r.prompt_cache", changed)
        return (
            None
            if changed == source
            else self.run_changed(SERVER, name, "renamed", {SERVER: changed})
        )

    def run_changed(self, module: str, path: str, kind: str, changed: stock_package.Sources) -> Row:
        row = Row(self.line, f"{module}.{path}", kind)
        folder = self._folder()
        lay_out(folder, package_of(self.line), changed)
        with self._server(folder, folder, **ASKED) as server:
            try:
                _Course(server, row, self.stock_answers["fixed"]).run()
            except (AssertionError, OSError, http.client.HTTPException) as error:
                row.wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
            row.wrong += faults_of_ours(server.text())
            row.log = server.text()
        shutil.rmtree(folder)
        return row

    @contextlib.contextmanager
    def changed(self, module: str, path: str, kind: str) -> Iterator[Drifted]:
        """A server with the changed sources, under the shim with the limits of a case."""
        folder = self._folder()
        lay_out(
            folder, package_of(self.line), mutate.mutate(self.sources, module, path, kind) or {}
        )
        with self._server(folder, folder, **ASKED) as server:
            yield server

    def serves(self, module: str, path: str, kind: str) -> Row | None:
        """Check that the changed server, without the shim, answers everything like stock."""
        changed = mutate.mutate(self.sources, module, path, kind)
        if changed is None:
            return None
        row = Row(self.line, f"{module}.{path}", kind)
        folder = self._folder()
        lay_out(folder, package_of(self.line), changed)
        with self._server(folder, folder, MLX_SHIM="0") as server:
            try:
                answers, stock = _answers(server.ready()), self.stock_answers
                row.wrong += [
                    f"{name}: {answers[name]}" for name in answers if answers[name] != stock[name]
                ]
            except (AssertionError, OSError, http.client.HTTPException) as error:
                row.wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
            row.served, row.log = not row.wrong, server.text()
        shutil.rmtree(folder)
        return row

    def control(self, module: str, path: str, kind: str) -> None:
        """Raise Inconclusive unless stock hangs in silence, and stays as a zombie after a death."""
        folder = self._folder()
        lay_out(
            folder, package_of(self.line), mutate.mutate(self.sources, module, path, kind) or {}
        )
        with self._server(folder, folder, MLX_SHIM="0") as server:
            server.ready()
            assert _answers(server) == self.stock_answers
            trigger = server.log.with_name("trigger")
            stream = _block(server, trigger)
            ended = wait_until(lambda: not server.alive or not stream.thread.is_alive(), 5)
            if ended or server.get("/health")[0] != 200:
                raise Inconclusive(
                    f"stock did not hang in silence; its log:\n{server.text()[-3000:]}"
                )
            trigger.unlink()
            server.send_and_leave(KILLER)
            expect_zombie(server)

    def _folder(self) -> Path:
        self._made += 1
        folder = self.folder / f"{self._made}"
        folder.mkdir()
        return folder

    def _server(self, folder: Path, package: Path | None, **environ: str | None) -> Drifted:
        """Each server has its own model, which names the file that triggers the fault."""
        model = folder / "model"
        model.mkdir()
        for file in self.model.path.iterdir():
            if file.name != "config.json":
                (model / file.name).symlink_to(file)
        config = json.loads((self.model.path / "config.json").read_text())
        config["fault"] |= {
            name: str(folder / name) for name in ("trigger", "counted", "loaded", "hurried")
        }
        (model / "config.json").write_text(json.dumps(config))
        return Drifted(
            self.line, package, model, folder / "log", args=self.model.args, environ=environ
        )


ASKED = {
    "MLX_SHIM_ON_STALL": "dump",
    "MLX_SHIM_DECODE_STALL": "1s",
    "MLX_SHIM_PREFILL_STALL": "2s",
    "MLX_SHIM_BAD_REQUEST": "0",
    "MLX_SHIM_KILLER_REQUEST": "0",
    "MLX_SHIM_CRASH_LOOP": "0",
}


def _answers(server: Drifted) -> dict[str, Any]:
    """Its answer to each of the fixed requests."""
    requests = {"fixed": ("/v1/completions", FIXED), **OTHERS}
    answers = {
        name: server.post(body | {"temperature": 0}, path)
        for name, (path, body) in requests.items()
    }
    return {name: _words(*answer) for name, answer in answers.items()}


def _words(status: int, answer: Any) -> Any:
    if status != 200:
        return status, answer
    choice = answer["choices"][0]
    return choice.get("text", choice.get("message")), choice["finish_reason"]


def _block(server: Drifted, trigger: Path) -> Stream:
    """A stream whose model has just been blocked."""
    stream = Stream(server, {"prompt": "x", "max_tokens": 100_000})
    assert stream.first.wait(30), f"nothing was streamed; its log:\n{server.text()[-2000:]}"
    assert not stream.error, stream.error
    trigger.touch()
    return stream


class _Course:
    """One server, from its start to its death."""

    def __init__(self, server: Drifted, row: Row, words: Any) -> None:
        self.server, self.row, self.words = server, row, words
        self.trigger = server.log.with_name("trigger")

    def run(self) -> None:
        self.server.ready()
        status, answer = self.server.post(FIXED)
        self.row.served = status == 200
        if not self.row.served:
            self.row.wrong.append(f"answered {status}: {str(answer)[:200]}")
        elif _words(status, answer) != self.words:
            self.row.wrong.append(
                f"other words: {_words(status, answer)}, stock's are {self.words}"
            )
        self.row.said = [x for x in self.server.shim_lines() if "guards: " not in x] + self._lost()
        self.hangs()
        self.dies()

    def _lost(self) -> list[str]:
        start = next((x for x in self.server.shim_lines() if "guards: " in x), "")
        return [
            f"{name} {kind}{why}"
            for name, kind, why in states(start)
            if kind not in ("active", "retired", "off")
        ]

    def cannot(self, guard: str) -> bool:
        """Whether the shim has said, before the fault, that the guard does not work."""
        if any("not active" in x for x in self.server.shim_lines()):
            return True
        lost = (f"{guard} incompatible", f"{guard} failed")
        return (
            any(x.startswith(lost) for x in self.row.said)
            or f"{guard} {self._health(guard)}" in lost
        )

    def _health(self, guard: str) -> str:
        answer = self.server.get("/health")[1]
        return str(answer.get("guards", {}).get(guard, "")) if isinstance(answer, dict) else ""

    def hangs(self) -> None:
        silent = self.cannot("stall")
        stream = _block(self.server, self.trigger)
        told = wait_until(
            lambda: "stalled: " in self.server.text(), 0 if silent else TOLD_WITHIN, 0.2
        )
        self.row.stall = "told" if told else "said" if silent else "missed"
        if not told and not silent:
            claim = self._health("stall")
            self.row.wrong.append(
                f"the stall is not told{f', and /health calls the guard {claim}' if claim else ''}"
            )
        had = len(stream.lines)
        self.trigger.unlink()
        if not wait_until(lambda: len(stream.lines) > had + 2, 10):
            self.row.wrong.append("the stream does not go on")

    def dies(self) -> None:
        cannot = self.cannot("generation_death")
        self.server.send_and_leave(KILLER)
        wait_until(lambda: not self.server.alive, ENDED_WITHIN if not cannot else 2)
        status = self.server.process.poll()
        self.row.death = str(status) if status is not None else "said" if cannot else "missed"
        if status != 70 and not cannot:
            self.row.wrong.append(
                "the death is not told" if status is None else f"ended with {status}, not 70"
            )
