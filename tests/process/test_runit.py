"""Each way a server ends, under the real runsv with the recipe in the docs: does it come back?"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess

import pytest

from kit.harness import NEWEST, REPO, Kept, free_port, need, python_of, wait_until
from kit.headline import RAISES, STALLS, recipe
from kit.streams import Stream

# Tokens.
FOREVER = 100_000


class Runit(Kept):
    """The server as runsv's child. `environ` goes into its script."""

    def __init__(self, folder, model, **environ):
        runsv = need("runsv")
        (folder / "service").mkdir()
        self.model, self.service = model, folder / "service"
        port = free_port()
        run = self.service / "run"
        run.write_text(script(port, model, environ))
        run.chmod(0o755)
        super().__init__(NEWEST, port, folder / "log", [runsv, str(self.service)])

    def sv(self, *words):
        """As the docs have it: `sv -w 31 WORDS FOLDER`, which waits for a drain."""
        ran = subprocess.run(
            [need("sv"), "-w", "31", *words, str(self.service)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return ran.returncode, ran.stdout

    def is_down(self):
        return self.sv("status")[1].startswith("down: ")

    def ended(self, count, status):
        """Wait until the log has so many runs that ended with this status, and it is back."""
        assert wait_until(lambda: self.text().count(f"; exit {status}\n") == count, 60), (
            self.text()[-3000:]
        )
        self.ready()

    def health(self):
        try:
            return self.get("/health")[1]
        except OSError:
            return {"status": "down"}


def script(port, model, environ):
    text = recipe("#!/bin/sh", "other-supervisors.md")
    for name, here in {
        "/path/to/mlx-lm-shim": str(REPO),
        "/path/to/venv/bin/python": python_of(NEWEST),
        "8080": str(port),
        "/path/to/model": f"{model.path} {' '.join(model.args)}",
    }.items():
        assert text.count(name) == 1
        text = text.replace(name, here)
    exports = "".join(f"export {name}={value}\n" for name, value in environ.items())
    return text.replace("exec /", f"{exports}exec /")


@pytest.mark.slow
@pytest.mark.guard("generation_death", "stall", "grown_process", "abrupt_stop")
@pytest.mark.usefixtures("killable")
def test_whatever_its_status_it_comes_back_until_it_is_told_to_stay_down(faulty, tmp_path):
    """A recycle (75), a stall and a death (70), and a stop that lets a stream finish (0)."""
    model = faulty(kind=RAISES, once=True, delay=0.02)
    limits = {
        "MLX_SHIM_RECYCLE_REQUESTS": "6",
        "MLX_SHIM_DECODE_STALL": "3s",
        "MLX_SHIM_EXIT_GRACE": "10s",
    }
    with Runit(tmp_path, model, **limits) as server:
        server.ready()
        for n in range(8):
            # The server may have reached its limit, and be away.
            with contextlib.suppress(OSError, http.client.HTTPException):
                server.post({"prompt": f"{n} until it has had enough", "max_tokens": 1})
        server.ended(1, 75)

        stalled = Stream(server, {"prompt": "no end", "max_tokens": FOREVER})
        assert stalled.first.wait(30)
        whole = model.trigger.with_suffix(".whole")
        whole.write_text(STALLS)
        whole.rename(model.trigger)
        server.ended(1, 70)
        assert "engine_stalled" in stalled.join().lines[-2]

        server.send_and_leave({"prompt": "a killer", "stop": [1]})
        server.ended(2, 70)

        stream = Stream(server, {"prompt": "to the end", "max_tokens": 100})
        assert stream.first.wait(30)
        assert server.sv("force-stop")[0] == 0
        assert stream.join().done
        assert server.is_down()
        assert server.text().rstrip().endswith("exit 0")
        assert server.health()["status"] == "down"


@pytest.mark.guard("crash_loop")
def test_boot_failures_are_slowed_down_and_a_wait_is_no_obstacle_to_a_stop(faulty, tmp_path):
    model = faulty(kind=RAISES)
    config = json.loads((model.path / "config.json").read_text())
    (model.path / "config.json").write_text(json.dumps(config | {"hidden_size": 65}))
    state = {
        "MLX_SHIM_CRASH_LOOP": "1",
        "MLX_SHIM_BREAKER": "2/10m,60s",
        "MLX_SHIM_STATE_DIR": str(tmp_path / "state"),
    }
    with Runit(tmp_path, model, **state) as server:
        assert wait_until(lambda: server.health()["status"] == "breaker", 90), server.text()[-3000:]
        assert server.text().count("; exit 78\n") == 2
        assert server.get("/health/live")[0] == 200, "nobody should kill it for that"
        assert server.post({"prompt": "x"})[1]["error"]["code"] == "breaker"
        assert server.sv("force-stop")[0] == 0
        assert server.is_down()
        assert server.text().rstrip().endswith("exit 0")
