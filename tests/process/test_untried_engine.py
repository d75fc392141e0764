"""/health/generate and `python -m shim probe`: whether the engine makes a token now, or why not."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import threading
import time

import pytest

from kit.harness import (
    LINES,
    NEWEST,
    REPO,
    Inconclusive,
    Server,
    clean_environ,
    python_of,
    wait_until,
)
from kit.streams import Stream
from shim import cli

OLDEST = LINES[0]
PATH = "/health/generate"
OFF = {"MLX_SHIM_UNTRIED_ENGINE": "0"}
OWN = "mlx-lm-shim - - "  # in the place of an address, in the log of requests


def asked(server):
    return server.text().count(OWN)


def run(*arguments):
    """The status of `python -m shim probe`, run in this process, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        cli.main(["probe", *arguments])
    return ended.value.code, out.getvalue()


def url_of(server):
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.guard("untried_engine")
def test_an_idle_engine_makes_a_token(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log") as server:
        server.ready()
        # The handler closes its request a moment after the client has the answer.
        assert wait_until(lambda: server.get("/health")[1]["counters"]["finished"] == 1, 10)
        before = server.get("/health")[1]["counters"]
        for path in (PATH, "/health_generate", f"{PATH}?timeout=5s"):
            status, body = server.get(path)
            assert (status, body["status"], body["by"]) == (200, "ok", "probe")
        told = server.get("/health")[1]
        assert told["counters"] == before
        assert told["in_flight"] == 0
        assert server.post({"prompt": "hello", "max_tokens": 1})[0] == 200
        counts = re.findall(r"Prompt Cache: (\d+) sequences", server.text())
        assert counts[-1] == "1", "that of `ready`: nothing of the probes is kept"
        command = [python_of(line), "-m", "shim", "probe", url_of(server)]
        told = subprocess.run(
            command, cwd=REPO, env=clean_environ(), capture_output=True, text=True, check=False
        )
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.startswith("ok: a token within ")


def test_a_busy_engine_is_not_asked_for_more(faulty, tmp_path):
    """The one place in the batch is taken: a token of the one that has it is an answer."""
    model = faulty(kind="none", delay=0.05)
    args = (*model.args, "--decode-concurrency", "1", "--prompt-concurrency", "1")
    with Server(OLDEST, model.path, tmp_path / "log", args=args) as server:
        server.ready()
        streams = [Stream(server, {"prompt": "x", "max_tokens": 10_000}) for _ in range(3)]
        assert wait_until(lambda: any(stream.first.is_set() for stream in streams), 30)
        begun = time.monotonic()
        status, body = server.get(PATH)
        assert (status, body["by"]) == (200, "requests")
        assert time.monotonic() - begun < 5
        assert asked(server) == 0


@pytest.mark.guard("untried_engine")
@pytest.mark.control("untried_engine")
def test_a_wedged_engine_and_control(faulty, tmp_path):
    """It stands still over a request whose client has left: /health cannot know, and says ok."""
    model = faulty(kind="sleep_while_triggered")
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args) as server:
        server.ready()
        model.fire()
        for _ in range(2):
            begun = time.monotonic()
            status, body = server.get(f"{PATH}?timeout=1")
            assert (status, body["status"]) == (503, "no_token")
            assert 1 <= time.monotonic() - begun < 3
            assert body["reason"].startswith("no token for 1 s")
        if server.get("/health")[0] != 200:
            raise Inconclusive("/health knows it")
        mark = tmp_path / "restarted"
        status, out = run(
            url_of(server), "--timeout", "500ms", "--restart", f"touch {mark}; exit 3"
        )
        assert status == 1
        assert "no_token: no token for 0.5 s" in out
        assert "status 3" in out
        assert mark.exists()
        model.trigger.unlink()
        assert wait_until(lambda: server.get(PATH, timeout=30)[0] == 200, 30)


def test_somebodys_prompt_proves_nothing(faulty, tmp_path):
    model = faulty(kind="none", prefill_delay=60)
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args) as server:
        model.hurry()
        server.ready()
        model.take_its_time()
        Stream(server, {"prompt": "x" * 50, "max_tokens": 2})
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 1, 10)
        status, body = server.get(f"{PATH}?timeout=1")
        assert (status, body["status"]) == (503, "busy")
        assert asked(server) == 0
        mark = tmp_path / "restarted"
        status, out = run(url_of(server), "--timeout", "500ms", "--restart", f"touch {mark}")
        assert (status, out.split(":")[0]) == (2, "busy")
        assert not mark.exists()
        model.hurry()


def test_one_probe_at_a_time(faulty, tmp_path):
    model = faulty(kind="none", delay=0.5)
    with Server(OLDEST, model.path, tmp_path / "log", args=model.args) as server:
        model.hurry()
        server.ready()
        model.take_its_time()
        told = []
        threads = [
            threading.Thread(target=lambda: told.append(server.get(PATH, timeout=30)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [status for status, _ in told] == [200] * 8
        assert asked(server) <= 2


def test_while_it_loads_and_a_timeout_that_makes_no_sense(faulty, tmp_path):
    model = faulty(kind="none", load_delay=60)
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        status, body = server.get(PATH)
        assert (status, body["status"]) == (503, "loading")
        assert run(url_of(server))[0] == 2
        for wrong in ("soon", "0", "1h", "-1"):
            status, body = server.get(f"{PATH}?timeout={wrong}")
            assert (status, body["error"]["param"]) == (400, "timeout")
        model.hurry()


def test_a_request_that_fails_is_told(tiny, tmp_path):
    """No token comes where each request fails."""
    with Server(OLDEST, tiny, tmp_path / "log", args=("--temp", "-1")) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        assert wait_until(lambda: server.get("/health")[0] == 200, 60)
        status, body = server.get(PATH)
        assert (status, body["status"]) == (503, "failed")
        assert "temperature must be at least 0" in body["reason"]
        assert run(url_of(server))[0] == 1


def test_it_asks_the_model_that_is_loaded(tiny, tmp_path):
    with Server(NEWEST, None, tmp_path / "log") as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        status, body = server.get(PATH)
        assert (status, body["status"]) == (503, "no_model")
        assert server.post({"prompt": "x", "max_tokens": 1, "model": str(tiny)})[0] == 200
        assert server.get(PATH)[0] == 200


def test_a_key_has_to_be_brought(tiny, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    key.chmod(0o600)
    environ = {"MLX_SHIM_API_KEY_FILE": str(key)}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        assert wait_until(lambda: server.get("/health")[0] == 200, 60)
        assert server.get(PATH)[0] == 401
        assert run(url_of(server))[0] == 2
        assert run(url_of(server), "--key-file", str(key))[0] == 0


@pytest.mark.control("untried_engine")
def test_control_without_the_guard_there_is_no_such_page(tiny, tmp_path):
    with Server(NEWEST, tiny, tmp_path / "log", environ=OFF) as server:
        if server.ready().get(PATH)[0] != 404:
            raise Inconclusive(server.get(PATH))
        assert run(url_of(server))[0] == 2
