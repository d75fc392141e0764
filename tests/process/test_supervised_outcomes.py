"""Each way a server ends, under the real supervisord with the unit that users get.

It comes back, or it does not. A death by a request is in test_supervised.py, a stall in
test_headline.py, and the same under runit in test_runit.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess

import pytest

from kit import headline
from kit.harness import NEWEST, VENVS, clean_environ, wait_until
from kit.headline import RAISES
from kit.streams import Stream

CONTROL = """
[unix_http_server]
file={folder}/sock
[supervisorctl]
serverurl=unix://{folder}/sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""


class Supervised(headline.Supervised):
    """With a supervisorctl."""

    def __init__(self, folder, model, **environ):
        self.folder = folder
        super().__init__(NEWEST, model, folder, hand_over=False, environ=environ)

    def configure(self, text):
        return CONTROL.format(folder=self.folder) + text

    def control(self, *words):
        ctl = [
            str(VENVS / NEWEST / "bin" / "supervisorctl"),
            "-c",
            str(self.folder / "conf"),
            *words,
        ]
        return subprocess.run(
            ctl, env=clean_environ(), capture_output=True, text=True, check=False, timeout=60
        ).stdout

    def health(self):
        try:
            return self.get("/health")[1]
        except OSError:
            return {"status": "down"}


@pytest.mark.guard("grown_process", "abrupt_stop")
def test_recycle_and_drain(faulty, tmp_path):
    """75 is started again; a stop by supervisorctl lets a stream finish, and is the end."""
    model = faulty(kind=RAISES, delay=0.02)
    with Supervised(tmp_path / "supervised", model, MLX_SHIM_RECYCLE_REQUESTS="6") as server:
        server.ready()
        for n in range(8):
            # The server may have reached its limit, and be away.
            with contextlib.suppress(OSError, http.client.HTTPException):
                server.post({"prompt": f"{n} until it has had enough", "max_tokens": 1})
        assert wait_until(lambda: "exit 75" in server.text(), 30)
        server.ready()
        stream = Stream(server, {"prompt": "to the end", "max_tokens": 100})
        assert stream.first.wait(30)
        server.control("stop", "mlx-lm")
        assert stream.join().done
        assert wait_until(lambda: "STOPPED" in server.control("status"), 30)
        assert "SIGTERM" in server.text()
        assert server.text().rstrip().endswith("exit 0")
        assert server.health()["status"] == "down"


@pytest.mark.guard("crash_loop")
@pytest.mark.parametrize("fault", ["boot", "kill"])
def test_deaths_in_a_row_are_slowed_down(fault, faulty, tmp_path):
    """A model that cannot be loaded (78), and SIGKILL: after the second end the start waits."""
    model = faulty(kind=RAISES)
    if fault == "boot":
        config = json.loads((model.path / "config.json").read_text())
        (model.path / "config.json").write_text(json.dumps(config | {"hidden_size": 65}))
    state = {
        "MLX_SHIM_CRASH_LOOP": "1",
        "MLX_SHIM_BREAKER": "2/10m,30s",
        "MLX_SHIM_STATE_DIR": str(tmp_path / "state"),
    }
    with Supervised(tmp_path / "supervised", model, **state) as server:
        if fault == "kill":
            for _ in range(2):
                server.ready()
                os.kill(int(server.control("pid", "mlx-lm")), signal.SIGKILL)
                assert wait_until(lambda: server.health()["status"] == "down", 30, step=0.01)
        assert wait_until(lambda: server.health()["status"] == "breaker", 90)
        health = server.health()
        assert 0 < health["seconds_left"] <= 33
        assert server.get("/health/live")[0] == 200, "nobody should kill it for that"
        status, answer = server.post({"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "breaker")
        if fault == "boot":
            assert server.text().count("exit 78") == 2
        server.control("stop", "mlx-lm")
        assert wait_until(lambda: "STOPPED" in server.control("status"), 30), (
            "a wait is no obstacle to a stop"
        )
