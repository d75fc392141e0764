"""Starts stock servers as children of a fork server, so that a start takes less processor time.

The fork server has imported the other packages that mlx_lm imports, but not mlx_lm, mlx, wrapt or
the shim. A start then costs a quarter of the processor time. The program that forks is
tests/kit/programs/fork_host.py.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HOST = Path(__file__).parent / "programs" / "fork_host.py"
# In seconds, on a busy machine.
ANSWERS_WITHIN = 120.0


class ForkServer:
    """The fork server of one interpreter, and what it tells of its children."""

    def __init__(self, python: str, environ: dict[str, str]) -> None:
        self._forked: dict[int, queue.Queue[Child]] = {}
        # Only the thread that reads uses it.
        self._running: dict[int, queue.Queue[int]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Open as long as the fork server runs.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(HOST)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if json.loads(self._process.stdout.readline() or "{}") != {"ready": True}:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")
            raise AssertionError(f"the fork server did not start:\n{text[-2000:]}")
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def close(self) -> None:
        """End the fork server, and the children that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()

    def fork(
        self,
        args: tuple[str, ...],
        *,
        file: str | None = None,
        environ: dict[str, str],
        cwd: Path,
        log: Path,
        bytecode: bool = True,
    ) -> Child:
        """Run `python FILE ARGS`, else `python -m mlx_lm ARGS`; append its output to `log`."""
        number = next(self._numbers)
        forked = self._forked[number] = queue.Queue()
        self._send(
            id=number,
            file=file,
            environ=environ,
            args=args,
            cwd=str(cwd),
            log=str(log),
            bytecode=bytecode,
        )
        return forked.get(timeout=ANSWERS_WITHIN)

    def kill(self, pid: int) -> None:
        """End a child and its group.

        The fork server knows whether the number still belongs to the child.
        """
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
                ended = self._running[answer["pid"]] = queue.Queue()
                self._forked.pop(answer["id"]).put(Child(self, answer["pid"], ended))
            else:
                self._running.pop(answer["pid"]).put(answer["status"])


class Child:
    """A child of the fork server, with what the tests use of a subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int, ended: queue.Queue[int]) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._ended.get_nowait()
            except queue.Empty:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (ANSWERS_WITHIN if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the child", timeout or ANSWERS_WITHIN)
            time.sleep(0.02)
        return int(self.returncode or 0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        self.server.kill(self.pid)
