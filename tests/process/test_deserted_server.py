"""With MLX_SHIM_PARENT=1 a server drains when the process that started it is gone."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import sys
import time

import pytest

from kit.harness import LINES, NEWEST, START, Inconclusive, Server, wait_until
from kit.streams import Stream

ON = {"MLX_SHIM_PARENT": "1"}
# PR_SET_CHILD_SUBREAPER, of <sys/prctl.h>.
SUBREAPER = 36

# Starts the rest of its command line, writes down the PID of that process, and stays.
PARENT = """
import pathlib, subprocess, sys
child = subprocess.Popen(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text(f"{child.pid}\\n")
child.wait()
"""
# Its child runs the rest of its command line, once this process is gone.
GONE_BEFORE = """
import os, pathlib, sys, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
os.execv(sys.argv[2], sys.argv[2:])
"""
# The stock server. It imports mlx_lm, and waits until its parent is gone before it runs.
DESERTED_EARLY = """
import os, time
parent = os.getppid()
import mlx_lm
open("imported", "w").close()
while os.getppid() == parent:
    time.sleep(0.01)
from mlx_lm.server import main
main()
"""


@pytest.fixture
def orphans():
    """Make this process the parent of orphans (a subreaper), so that it is told their status."""
    if sys.platform != "linux":
        pytest.skip("only Linux has subreapers")
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    yield
    ctypes.CDLL(None).prctl(SUBREAPER, 0)


class Orphan:
    """A server whose parent the test may end. `server` is that parent, and talks to the server."""

    def __init__(self, line, model, folder, *, starter=PARENT, args=(), entry=None, **environ):
        noted = folder / "pid"
        made = {"entry": entry} if entry else {}
        prefix = (sys.executable, "-c", starter, str(noted))
        self.server = Server(
            line, model, folder / "log", prefix=prefix, args=args, environ=environ, fresh=True,
            cwd=folder, **made,
        )  # fmt: skip
        assert wait_until(lambda: noted.exists() and noted.read_text().endswith("\n"), START)
        self.pid = int(noted.read_text())
        self.status = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.__exit__()
        if self.status is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def desert(self):
        self.server.process.kill()
        self.server.process.wait()

    def answers(self):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.server.post({"prompt": "x", "max_tokens": 1})[0] == 200
        return False

    def has_ended(self):
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def lines(self, text):
        return [line for line in self.server.shim_lines() if text in line]


@pytest.mark.guard("deserted_server")
def test_a_server_whose_parent_is_killed_drains(orphans, faulty, tmp_path):
    model = faulty(kind="none", delay=0.03)
    with Orphan(NEWEST, model.path, tmp_path, args=model.args, **ON) as orphan:
        stream = Stream(orphan.server.ready(), {"prompt": "x", "max_tokens": 400})
        assert stream.first.wait(60)
        time.sleep(1)
        assert orphan.server.get("/health")[1]["status"] == "ok", "its parent is there"
        parent = orphan.server.pid
        orphan.desert()
        assert wait_until(lambda: orphan.server.get("/health")[1]["status"] == "draining", 30)
        model.hurry()
        assert stream.join().done
        assert wait_until(orphan.has_ended, 30), orphan.server.text()
        assert orphan.status == 0
        (said,) = orphan.lines("stopped: ")
        assert f"its parent, process {parent}, is gone; in flight: 1 finished, 0 cut" in said


@pytest.mark.control("deserted_server")
def test_control_a_server_stays_behind(orphans, tiny, tmp_path):
    """One was not asked to look at its parent, the other has the guard off."""
    environs = ({}, ON | {"MLX_SHIM_DESERTED_SERVER": "0"})
    with contextlib.ExitStack() as stack:
        both = []
        for line, environ in zip(LINES, environs, strict=True):
            (folder := tmp_path / line).mkdir()
            both.append(stack.enter_context(Orphan(line, tiny, folder, **environ)))
        for orphan in both:
            orphan.server.ready()
            orphan.desert()
        time.sleep(2)
        for orphan in both:
            if orphan.has_ended() or not orphan.answers():
                raise Inconclusive(f"it ended by itself with {orphan.status}")


@pytest.mark.guard("deserted_server")
def test_a_parent_that_is_gone_before_the_server_runs(orphans, tiny, tmp_path):
    """It was there when Python began to import mlx_lm."""
    program = tmp_path / "program.py"
    program.write_text(DESERTED_EARLY)
    with Orphan(LINES[0], tiny, tmp_path, entry=(str(program),), **ON) as orphan:
        assert wait_until((tmp_path / "imported").exists, START)
        orphan.desert()
        assert wait_until(orphan.has_ended, START), orphan.server.text()
        assert orphan.status == 0
        assert orphan.lines("is gone; in flight: 0 finished, 0 cut")


@pytest.mark.guard("deserted_server")
def test_no_parent_to_watch_is_said_and_the_server_stays(orphans, tiny, tmp_path):
    """Its parent was gone before. The subreaper that took the orphan in is not watched."""
    with Orphan(NEWEST, tiny, tmp_path, starter=GONE_BEFORE, **ON) as orphan:
        assert wait_until(orphan.answers, START), orphan.server.text()
        assert len(orphan.lines("there is no parent to watch")) == 1
        time.sleep(0.5)
        assert orphan.answers()
        assert not orphan.lines("is gone")
