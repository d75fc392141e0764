"""Starts stock servers with changed sources, as children of a line's fork server (host.py)."""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from kit.drift.stock_package import Sources, file_of
from kit.harness import REPO, START, VENVS, Server, clean_environ, free_port, python_of, wait_until

READY = 30.0
HERE = Path(__file__).parent


def package_of(line: str) -> Path:
    """The folder of a line's mlx_lm."""
    return next((VENVS / line / "lib").glob("python*/site-packages/mlx_lm"))


def lay_out(folder: Path, package: Path, changed: Sources) -> Path:
    """Make a mlx_lm in `folder` with the changed modules, and links to stock for the others."""
    shutil.copy(HERE / "names.py", folder / "drift_names.py")
    for module, source in changed.items():
        path = file_of(folder, module) if "." in module else folder / module / "__init__.py"
        # A package that is not laid out yet.
        if (package.parent / path.relative_to(folder).with_suffix("") / "__init__.py").is_file():
            path = path.with_suffix("") / "__init__.py"
        for parent in reversed(path.relative_to(folder).parents[:-1]):
            (folder / parent).mkdir(exist_ok=True)
        path.write_text(source)
    _link(folder / package.name, package, {file_of(folder, module) for module in changed})
    return folder


def _link(folder: Path, stock: Path, changed: set[Path]) -> None:
    folder.mkdir(exist_ok=True)
    for item in stock.iterdir():
        ours = folder / item.name
        if item.name == "__pycache__":
            stale = {path.stem for path in changed if path.parent == folder}
            ours.mkdir()
            for compiled in item.iterdir():
                if compiled.name.partition(".")[0] not in stale:
                    (ours / compiled.name).symlink_to(compiled)
        elif ours.is_dir():
            _link(ours, item, changed)
        elif ours not in changed:
            ours.symlink_to(item)


class Host:
    """The fork server of a line, and its reports about its children."""

    def __init__(self, line: str, log: Path) -> None:
        self.line = line
        self._answers: dict[Any, queue.Queue[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [python_of(line), str(HERE / "host.py")],
            env=clean_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if json.loads(self._process.stdout.readline() or "{}") != {"ready": True}:
            raise AssertionError(f"the fork server did not start:\n{log.read_text()[-2000:]}")
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()

    def fork(
        self, path: list[Path], environ: dict[str, str], args: tuple[str, ...], log: Path
    ) -> Child:
        number = next(self._numbers)
        with self._lock:
            answer = self._answers[f"id {number}"] = queue.Queue()
        self._send(id=number, path=[str(p) for p in path], environ=environ, args=args, log=str(log))
        pid = answer.get(timeout=START)
        return Child(self, pid, self._answer_of(f"pid {pid}"))

    def _answer_of(self, key: str) -> queue.Queue[Any]:
        with self._lock:
            return self._answers.setdefault(key, queue.Queue())

    def kill(self, pid: int) -> None:
        """Let the host kill it: the host knows whether the number is still the child's."""
        self._send(kill=pid)

    def _send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self, answers: Any) -> None:
        for line in answers:
            answer = json.loads(line)
            if "id" in answer:
                self._answer_of(f"pid {answer['pid']}")
                self._answer_of(f"id {answer['id']}").put(answer["pid"])
            else:
                self._answer_of(f"pid {answer['pid']}").put(answer["status"])


class Child:
    """A child of the fork server, with the part of subprocess.Popen that harness.Server uses."""

    def __init__(self, host: Host, pid: int, ended: queue.Queue[Any]) -> None:
        self.host, self.pid, self.returncode = host, pid, None
        self._ended = ended

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._ended.get_nowait()
            except queue.Empty:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (START if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the child", timeout or START)
            time.sleep(0.02)
        return int(self.returncode or 0)


class Drifted(Server):
    """The server of a line, run by its fork server with the mlx_lm in `folder` (None: stock's)."""

    def __init__(
        self,
        host: Host,
        folder: Path | None,
        model: Path,
        log: Path,
        *,
        args: tuple[str, ...] = (),
        environ: dict[str, str | None] | None = None,
    ) -> None:
        self.port, self.log, self.line, self.sockets = free_port(), log, host.line, []
        path = [REPO, *([folder] if folder is not None else [])]
        variables = clean_environ(**(environ or {}), PYTHONPATH=":".join(map(str, path)))
        command = ("server", "--port", str(self.port), "--model", str(model), *args)
        log.touch()
        self.process = host.fork(path, variables, command, log)

    def ready(self) -> Drifted:
        """Wait less than for other servers: it is up within a second, or it does not serve."""
        assert wait_until(self._answers, READY), f"never answered; its log:\n{self.text()[-3000:]}"
        return self

    def post(
        self, body: Any, path: str = "/v1/completions", timeout: float = READY
    ) -> tuple[int, Any]:
        return super().post(body, path, timeout)

    def __exit__(self, *_: object) -> None:
        for s in self.sockets:
            s.close()
        if self.process.poll() is None:
            self.process.host.kill(self.process.pid)
        self.process.wait()
