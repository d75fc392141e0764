"""Runs the stock server as users do: a real child process, real HTTP on loopback, one port each."""

from __future__ import annotations

import collections
import contextlib
import http.client
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kit.fork_server import Child, ForkServer

REPO = Path(__file__).resolve().parents[2]
VENVS = Path(os.environ.get("MLX_LM_SHIM_TEST_VENVS", REPO / ".venvs"))
# The two lines of mlx-lm in use. tests/run.py makes an environment for each.
LINES = ("0.31.3", "0.32.2")
NEWEST = LINES[-1]
# Whether tests that share the cases of both lines out between them run each case on both.
BOTH_LINES = bool(os.environ.get("MLX_LM_SHIM_TEST_BOTH_LINES"))

# Seconds that a start or an answer may take on a busy two-core machine: a generous bound, not a
# measurement.
START = 120.0
ANSWER = 90.0


# This request kills the generation thread where the guards that refuse it are off: the fixture
# `killable`.
KILLER = {"prompt": "x", "stop": [1]}
# Every server of a test has this in its environment too. So no test waits because a server died in
# another test, nor for a self-check that it does not show.
# A line of the log is there before the answer that it is about: with blocking_log it comes some
# milliseconds later.
always: dict[str, str] = {
    "MLX_SHIM_CRASH_LOOP": "0",
    "MLX_SHIM_SELF_CHECK": "0",
    "MLX_SHIM_BLOCKING_LOG": "0",
}


class Inconclusive(Exception):
    """A negative control did not show its fault: the test then proves nothing about the guard."""


def python_of(line: str) -> str:
    """The interpreter of a line's environment; the path of an interpreter stands for itself."""
    if Path(line).is_absolute():
        return line
    return str(VENVS / line / "bin" / "python")


def clean_environ(**more: str | None) -> dict[str, str]:
    """The environment without PYTHONPATH and MLX_SHIM*, offline, plus `more`.

    None removes a name.
    """
    environ = {
        k: v
        for k, v in os.environ.items()
        if k != "PYTHONPATH" and not k.startswith(("MLX_SHIM", "PYTEST_"))
    }
    environ |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | always
    for name, value in more.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    return environ


def need(program: str) -> str:
    """The path of a program that Debian has.

    Where it is missing, the test is skipped with its name, and fails in .ci/run.
    """
    path = shutil.which(program)
    if path is None and os.environ.get("MLX_LM_SHIM_TEST_NO_SKIP"):
        pytest.fail(f"{program} is not installed")
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def run_program(
    line: str, file: Path, *args: str, environ: dict[str, str], timeout: float = START
) -> tuple[int, str]:
    """The exit status of `python FILE ARGS` and what it wrote; its folder is the current one."""
    log = file.with_suffix(".log")
    log.touch()
    child = fork_server(line).fork(args, file=str(file), environ=environ, cwd=file.parent, log=log)
    try:
        return child.wait(timeout), log.read_text(errors="replace")
    finally:
        if child.poll() is None:
            child.kill_group()


def free_port() -> int:
    """A port that stays free until the server binds it.

    No other worker and no client's connection gets it.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            claim = socket.socket(type=socket.SOCK_DGRAM)
            with contextlib.suppress(OSError):
                claim.bind(("127.0.0.1", port))
                _claims.append(claim)
                if len(_claims) > MOST_CLAIMS:
                    _claims.popleft().close()
                return port
            claim.close()
    raise AssertionError("unreachable")


# Each of the last ports is claimed by a UDP socket of the same number, because its server may bind
# it seconds later. Without a claim, another run of the tests on this machine may take the same
# port, and its server may answer the requests that are meant for this one.
MOST_CLAIMS = 50
_claims: collections.deque[socket.socket] = collections.deque()


def _own_ports() -> Iterator[int]:
    """The ports of this worker, again and again.

    They are below those that systems give to connections (Linux from 32768, macOS from 49152).
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first, count = 10_000 + worker % 10 * 2_000, 2_000
    # Two runs on one machine seldom meet.
    for n in itertools.count(secrets.randbelow(count)):
        yield first + n % count


_PORTS = _own_ports()


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield int(s.getsockname()[1])


def wait_until(true: Any, timeout: float, step: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(step)
    return bool(true())


# Whether a server that asks for nothing special is the child of a fork server. tests/conftest.py
# sets it.
forking = False
_fork_servers: dict[str, ForkServer] = {}
_MODULE = ("-m", "mlx_lm", "server")


def fork_server(line: str) -> ForkServer:
    """The fork server of a line, started when it is first asked for."""
    if line not in _fork_servers:
        _fork_servers[line] = ForkServer(python_of(line), clean_environ())
    return _fork_servers[line]


def close_fork_servers() -> None:
    while _fork_servers:
        _fork_servers.popitem()[1].close()


class Server:
    """The stock server in a child process, under the shim unless `environ` says MLX_SHIM="0".

    `entry` follows the line's interpreter, or is a command of its own; the server's arguments are
    appended. A server started as `-m mlx_lm server`, or by a file, is the child of a fork server,
    unless something that it is given needs an interpreter of its own. `fresh=True` asks for such an
    interpreter, for tests of how a start goes or how much a process takes.
    """

    # Sent with every request.
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        line: str,
        model: Path | str | None,
        log: Path,
        *,
        entry: tuple[str, ...] = _MODULE,
        args: tuple[str, ...] = (),
        environ: dict[str, str | None] | None = None,
        port: int | None = None,
        prefix: tuple[str, ...] = (),
        stderr: Any = None,
        cwd: Path | None = None,
        pass_fds: tuple[int, ...] = (),
        fresh: bool = False,
        bytecode: bool = True,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        self.line = line
        self.sockets: list[socket.socket] = []
        self.process: Any
        args = ("--port", str(self.port), *args)
        if model is not None:
            args += ("--model", str(model))
        given = {"PYTHONPATH": str(REPO)} | (environ or {})
        variables = clean_environ(**given)
        # What an interpreter, or a module that the fork server has imported, reads as it starts.
        early = {
            name
            for name in given
            if name != "PYTHONPATH" and not name.startswith(("MLX_SHIM", "MLX_LM_"))
        }
        file = entry[0] if entry[0].endswith(".py") else None
        usual = entry == _MODULE or file
        special = prefix or stderr is not None or pass_fds or not usual or early
        if forking and not (fresh or special or Path(line).is_absolute()):
            log.touch()
            self.process = fork_server(line).fork(
                (*entry[1 if file else 2 :], *args),
                file=file,
                environ=variables,
                cwd=cwd or log.parent,
                log=log,
                bytecode=bytecode,
            )
            return
        program: tuple[str, ...] = entry
        if entry[0].startswith("-") or entry[0].endswith(".py"):
            program = (python_of(line), *entry)
        if not bytecode:
            variables["PYTHONDONTWRITEBYTECODE"] = "1"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*prefix, *program, *args],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if stderr is None else stderr,
                cwd=cwd or log.parent,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for s in self.sockets:
            s.close()
        if self.process.poll() is None:
            if isinstance(self.process, Child):
                self.process.kill_group()
            else:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def shim_lines(self) -> list[str]:
        return [x for x in self.text().splitlines() if x.startswith("mlx-lm-shim: ")]

    def wait_exit(self, timeout: float = START) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still alive after {timeout} s; its log:\n{self.text()[-4000:]}"
            ) from None

    def ready(self) -> Server:
        """Wait until the model answers."""
        assert wait_until(self._answers, START), f"never answered; its log:\n{self.text()[-4000:]}"
        return self

    def _answers(self) -> bool:
        if not self.alive:
            raise AssertionError(
                f"exited with {self.process.returncode}; its log:\n{self.text()[-4000:]}"
            )
        try:
            return self.post({"prompt": "x", "max_tokens": 1})[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def connect(self, timeout: float = ANSWER) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def post(
        self, body: Any, path: str = "/v1/completions", timeout: float = ANSWER
    ) -> tuple[int, Any]:
        """(status, parsed body or text).

        Raises OSError or http.client.HTTPException where no whole answer came.
        """
        connection = self.connect(timeout)
        try:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(
                "POST", path, raw, {"Content-Type": "application/json"} | self.headers
            )
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def get(self, path: str, timeout: float = 10) -> tuple[int, Any]:
        connection = self.connect(timeout)
        try:
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def send_and_leave(self, body: Any, path: str = "/v1/completions") -> socket.socket:
        """Send a request and return its socket, without waiting for the answer.

        The socket stays open as long as the server object.
        """
        raw = json.dumps(body).encode()
        s = socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        s.sendall(head.encode() + raw)
        self.sockets.append(s)
        return s

    def is_zombie(self, patience: float = 4.0) -> bool:
        """Whether it is alive and answers no completion. The guards exist to prevent this."""
        time.sleep(1)
        try:
            status, _ = self.post({"prompt": "x", "max_tokens": 1}, timeout=patience)
        except (OSError, http.client.HTTPException):
            status = 0
        return self.alive and status != 200


class Kept(Server):
    """The server as the child of a supervisor, `command`.

    It may die and come back, on the same port.
    """

    def __init__(self, line: str, port: int, log: Path, command: list[str]) -> None:
        self.sockets = []
        self.port, self.log, self.line = port, log, line
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=clean_environ(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def dies_and_comes_back(self) -> None:
        self.ready().send_and_leave(KILLER)
        assert wait_until(lambda: "exit 70" in self.text(), 30)
        self.ready()


def expect_zombie(server: Server, patience: float = 4.0) -> None:
    """The negative control: raise Inconclusive unless the fault of stock appears."""
    if not server.is_zombie(patience):
        raise Inconclusive(f"no zombie: alive={server.alive}; its log:\n{server.text()[-3000:]}")
