"""What `python -m shim supervisord` prints, under the real supervisord."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from kit.harness import (
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
from shim.units import supervisord
from shim.units.plan import Unit

SUPERVISORD = (
    "[supervisord]\nnodaemon=true\n"
    "logfile={folder}/supervisord.log\npidfile={folder}/supervisord.pid\n"
)


def supervise(folder, text):
    config = folder / "conf"
    config.write_text(SUPERVISORD.format(folder=folder) + text)
    return [str(VENVS / NEWEST / "bin" / "supervisord"), "-c", str(config)]


@pytest.mark.usefixtures("killable")
def test_the_unit_for_supervisord(tiny, tmp_path):
    python, port, log = python_of("0.31.3"), free_port(), tmp_path / "log"
    made = subprocess.run(
        [
            python,
            "-m",
            "shim",
            "supervisord",
            "--log",
            str(log),
            "--",
            python,
            "-m",
            "mlx_lm",
            "server",
            "--port",
            str(port),
            "--model",
            str(tiny),
            "--chat-template-args",
            '{"a": "100% of $it; # no comment"}',
        ],
        cwd=REPO,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    with Kept("0.31.3", port, log, supervise(tmp_path, made.stdout)) as server:
        server.dies_and_comes_back()


# Stands for a server that takes a socket by systemd's protocol: answers once, and dies.
MORTAL = """\
import os, socket
assert os.environ["LISTEN_PID"] == str(os.getpid()) and os.environ["LISTEN_FDS"] == "1"
with socket.socket(fileno=3) as listening:
    taken, _ = listening.accept()
    taken.sendall(str(os.getpid()).encode())
    os._exit(70)
"""


@pytest.mark.parametrize("holder", [True, False])
def test_the_socket_of_supervisord_outlives_the_server(tmp_path, holder):
    (tmp_path / "mortal.py").write_text(MORTAL)
    port = free_port()
    # supervisord's SIGTERM has no effect on a child that has not reached its exec. That child is
    # killed after 2 seconds.
    unit = Unit(
        "mortal",
        (sys.executable, str(tmp_path / "mortal.py")),
        {"A": "a b"},
        2,
        port=port,
        socket=True,
        log=str(tmp_path / "log"),
    )
    (text,) = supervisord.made(unit).files.values()
    # The control.
    if not holder:
        text = text.replace("numprocs=2", "numprocs=1\nnumprocs_start=1")
    with Kept(NEWEST, port, tmp_path / "out", supervise(tmp_path, text)):
        assert wait_until(lambda: answered(port), 30)
        # It is dead, or about to be. From here on no client is refused.
        time.sleep(0.1)
        pids = [answered(port) for _ in range(2)]
    if not holder:
        if all(pids):
            raise Inconclusive("nobody was refused")
        return
    assert all(pids), (tmp_path / "log").read_text()
    assert len(set(pids)) == len(pids), "each was another process"


def answered(port):
    """The process that answered, or nothing where the connection was refused or cut."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            return client.recv(100).decode()
    except ConnectionError:
        return ""
