"""A real KeepAlive: supervisord restarts a dead server, and the next request is answered."""

from __future__ import annotations

import subprocess
import textwrap
import time

import pytest

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

pytestmark = pytest.mark.usefixtures("killable")

CONFIG = """
    [supervisord]
    nodaemon=true
    logfile={folder}/supervisord.log
    pidfile={folder}/supervisord.pid

    [program:mlx]
    command={python} -m mlx_lm server --model {model} --port {port}
    environment=PYTHONPATH="{repo}",HF_HUB_OFFLINE="1",MLX_SHIM="{switch}"
    autorestart=unexpected
    startsecs=1
    stopasgroup=true
    redirect_stderr=true
    stdout_logfile={folder}/log
"""


class Supervised(Kept):
    """The server as a supervisord's child.

    It may die and come back under another PID, on the same port.
    """

    def __init__(self, line, model, folder, *, switch="1"):
        self.sockets = []
        self.port, self.log, self.line = free_port(), folder / "log", line
        folder.mkdir()
        config = folder / "conf"
        config.write_text(
            textwrap.dedent(CONFIG).format(
                folder=folder,
                python=python_of(line),
                model=model,
                port=self.port,
                repo=REPO,
                switch=switch,
            )
        )
        command = [str(VENVS / NEWEST / "bin" / "supervisord"), "-c", str(config)]
        with (folder / "out").open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=clean_environ(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        assert wait_until(self.log.exists, 30)


@pytest.mark.guard("generation_death")
@pytest.mark.parametrize("deaths", [2])
def test_supervisord_restarts_it_and_the_next_request_is_answered(line, tiny, tmp_path, deaths):
    with Supervised(line, tiny, tmp_path / "supervised") as server:
        server.ready()
        for _ in range(deaths):
            server.send_and_leave(KILLER)
            killed = time.monotonic()
            assert wait_until(lambda: not answers(server), 30)
            server.ready()
            print(f"{line}: {time.monotonic() - killed:.1f} s from the death to the next 200")
        assert server.text().count("exit 70") == deaths


def answers(server):
    try:
        return server.get("/v1/models")[0] > 0
    except OSError:
        return False


@pytest.mark.control("generation_death")
def test_control_stock_is_never_restarted(line, tiny, tmp_path):
    with Supervised(line, tiny, tmp_path / "supervised", switch="0") as server:
        server.ready().send_and_leave(KILLER)
        time.sleep(8)
        if not server.is_zombie():
            raise Inconclusive("stock was restarted")
