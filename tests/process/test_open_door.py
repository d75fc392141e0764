"""With a key file no client is served without the key; without the guard any is (the control)."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import openai
import pytest

from kit.harness import NEWEST, REPO, Inconclusive, Server, clean_environ, python_of
from kit.streams import Stream

KEY = "sk-7f3a9c1e5b8d2046f1a7c3e9"
WRONG = "sk-wrongwrongwrongwrongwrong"
BEARER = {"Authorization": f"Bearer {KEY}"}
UNAUTHORIZED = {"error": {"type": "invalid_request_error", "code": "invalid_api_key"}}


@pytest.fixture
def key_file(tmp_path) -> Path:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    return file


def said_to(server, raw):
    """The answer on a connection to these bytes, until the server closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(raw)
        return b"".join(iter(lambda: s.recv(65536), b"")).decode(errors="replace")


# Requests that bring no key. Different parts of stock may answer them, but none may do any work for
# them.
BODY = b'{"prompt": "x", "max_tokens": 1}'
POST = b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY)
TURNED_AWAY = {
    "no key": b"POST /v1/completions" + POST + b"\r\n" + BODY,
    "a wrong key": b"POST /v1/completions"
    + POST
    + b"Authorization: Bearer "
    + WRONG.encode()
    + b"\r\n\r\n"
    + BODY,
    "a wrong scheme": b"POST /v1/completions"
    + POST
    + b"Authorization: Basic "
    + KEY.encode()
    + b"\r\n\r\n"
    + BODY,
    "two keys": b"POST /chat/completions"
    + POST
    + b"Authorization: Bearer x\r\nAuthorization: Bearer y\r\n\r\n"
    + BODY,
    "a body announced and never sent": (
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n"
    ),
    "no length": b"POST /v1/completions HTTP/1.1\r\n\r\n",
    "models": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "models/": b"GET /v1/models/ HTTP/1.1\r\n\r\n",
    "//v1/models": b"GET //v1/models HTTP/1.1\r\n\r\n",
    "models with a query": b"GET /v1/models?x=/health HTTP/1.1\r\n\r\n",
    "modelsx": b"GET /v1/modelsx HTTP/1.0\r\n\r\n",
    "absolute": b"GET http://127.0.0.1/v1/models HTTP/1.1\r\n\r\n",
    "absolute health": b"GET http://127.0.0.1/health HTTP/1.1\r\n\r\n",
    "dots": b"GET /health/../v1/models HTTP/1.1\r\n\r\n",
    "a path that is not there": b"GET /nothing HTTP/1.1\r\n\r\n",
    "health of another method": b"POST /health" + POST + b"\r\n" + BODY,
    "a method that is not there": b"BREW /v1/models HTTP/1.1\r\n\r\n",
}
MALFORMED = {
    "an option in small": b"options /v1/models HTTP/9.9\r\n\r\n",
    "nonsense": b"\x16\x03\x01 nonsense nonsense nonsense\r\n\r\n",
    "POST of HTTP/0.9": b"POST /v1/completions\r\n\r\n",
    "a long header": b"GET /v1/models HTTP/1.1\r\nAuthorization: " + b"x" * 70_000 + b"\r\n\r\n",
}


def check_that_it_is_closed(server, model):
    for name, raw in TURNED_AWAY.items():
        said = said_to(server, raw)
        head, _, body = said.partition("\r\n\r\n")
        assert head.startswith("HTTP/1.0 401 "), (name, said)
        assert "\r\nWWW-Authenticate: Bearer\r\n" in head, name
        error = json.loads(body)["error"]
        assert {k: error[k] for k in ("type", "code")} == UNAUTHORIZED["error"], name
    assert said_to(server, b"HEAD /v1/models HTTP/1.1\r\n\r\n").endswith("\r\n\r\n"), (
        "no body for HEAD"
    )
    assert (
        json.loads(said_to(server, b"GET /v1/models\r\n\r\n"))["error"]["code"] == "invalid_api_key"
    ), "HTTP/0.9"
    for name, raw in MALFORMED.items():
        said = said_to(server, raw)
        assert model not in said, (name, said)
        assert '"choices"' not in said, (name, said)


def check_that_it_opens(server):
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0
    )
    assert (
        client.completions.create(
            model="default_model", prompt="o", max_tokens=2
        ).usage.completion_tokens
        == 2
    )
    assert [model.object for model in client.models.list()]
    stranger = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=WRONG, max_retries=0
    )
    # The second is far larger than the sockets' buffers: it is answered all the same.
    for prompt in ("p", "large " * 2_000_000):
        with pytest.raises(openai.AuthenticationError) as turned_away:
            stranger.completions.create(model="default_model", prompt=prompt)
        assert turned_away.value.code == "invalid_api_key"


def check_what_is_open(server):
    for path in ("/health", "/health/live", "/health/ready", "/health?x"):
        assert said_to(server, f"GET {path} HTTP/1.1\r\n\r\n".encode()).startswith(
            "HTTP/1.0 200 "
        ), path
    preflight = said_to(server, b"OPTIONS /v1/completions HTTP/1.1\r\nOrigin: http://x\r\n\r\n")
    assert preflight.startswith("HTTP/1.0 204 ")
    assert "\r\nAccess-Control-Allow-Headers: Authorization\r\n" in preflight, (
        "else no browser sends the key"
    )


def check_that_nothing_tells_the_key(server):
    text = server.text()
    assert "DEBUG" in text, "stock said all it has to say"
    shown = text + "".join(
        Path(f"/proc/{server.pid}/{name}").read_text(errors="replace")
        for name in ("cmdline", "environ")
        if Path("/proc").is_dir()
    )
    assert not any(secret in shown for secret in (KEY, WRONG, KEY[:12], WRONG[:12]))


@pytest.mark.guard("open_door")
def test_nobody_gets_in_without_the_key(line, faulty, key_file, tmp_path):
    model = faulty(kind="RuntimeError", delay=0.02)
    environ = {
        "MLX_SHIM_API_KEY_FILE": f" {key_file} ",
        "MLX_SHIM_DEBUG": "1",
        "MLX_SHIM_REPORT_DIR": str(tmp_path / "reports"),
        # Stock lists its contents, and fails where it does not exist.
        "HF_HUB_CACHE": str(tmp_path),
    }
    arguments = (*model.args, "--log-level", "DEBUG")
    with Server(line, model.path, tmp_path / "log", args=arguments, environ=environ) as server:
        server.headers = dict(BEARER)
        server.ready()
        check_that_it_is_closed(server, str(model.path))
        check_that_it_opens(server)
        check_what_is_open(server)
        check_that_nothing_tells_the_key(server)
        counters = server.get("/health")[1]["counters"]
        key_file.unlink()
        assert server.post({"prompt": "the key was read at the start", "max_tokens": 1})[0] == 200
        assert server.get("/health")[1]["counters"]["requests"] == counters["requests"] + 1

        # A crash, with the key in the prompt as well.
        running = Stream(server, {"prompt": f"my key is {KEY}", "max_tokens": 5000})
        assert running.first.wait(30)
        model.fire()
        assert server.wait_exit(30) == 70
        (report,) = (tmp_path / "reports").iterdir()
        assert "the model's forward failed" in report.read_text()
        assert KEY not in report.read_text()
        assert not any(KEY in told for told in server.shim_lines())


@pytest.mark.guard("open_door")
def test_no_server_where_the_file_cannot_be_used(line, tiny, key_file, tmp_path):
    key_file.chmod(0o604)
    for file, why in ((key_file, "chmod 600"), (tmp_path / KEY, "No such file or directory")):
        environ = {"MLX_SHIM_API_KEY_FILE": str(file)}
        with Server(line, tiny, tmp_path / "log", environ=environ) as server:
            assert server.wait_exit() == 78
            (fatal,) = [x for x in server.shim_lines() if "fatal:" in x and why in x]
            assert "MLX_SHIM_API_KEY_FILE" in fatal
            assert "exit 78" in fatal
            assert KEY not in server.text(), "it may be the key itself, in the wrong place"


@pytest.mark.guard("open_door")
def test_doctor_says_so(key_file):
    for environ, status, says in (
        ({"MLX_SHIM_API_KEY_FILE": str(key_file)}, 0, "open_door               active"),
        ({}, 0, "open_door               off (MLX_SHIM_API_KEY_FILE is not set)"),
        (
            {"MLX_SHIM_API_KEY_FILE": KEY},
            1,
            "FIX: open_door is failed: the key file cannot be read: No such file",
        ),
    ):
        answer = subprocess.run(
            [python_of(NEWEST), "-m", "shim", "doctor"],
            capture_output=True,
            text=True,
            check=False,
            cwd=REPO,
            env=clean_environ(PYTHONPATH=str(REPO), **environ),
        )
        assert (answer.returncode, says in answer.stdout) == (status, True), answer.stdout
        assert KEY not in answer.stdout + answer.stderr


@pytest.mark.control("open_door")
def test_control_without_the_guard_anyone_is_served(line, tiny, key_file, tmp_path):
    environ = {
        "MLX_SHIM_API_KEY_FILE": str(key_file),
        "MLX_SHIM_OPEN_DOOR": "0",
        "HF_HUB_CACHE": str(tmp_path),
    }
    with Server(line, tiny, tmp_path / "log", environ=environ) as server:
        server.ready()
        assert any(
            "MLX_SHIM_API_KEY_FILE has no effect: MLX_SHIM_OPEN_DOOR is off" in x
            for x in server.shim_lines()
        )
        said = said_to(server, TURNED_AWAY["a wrong key"])
        models = said_to(server, TURNED_AWAY["//v1/models"])
        if '"choices"' not in said or str(tiny) not in models:
            raise Inconclusive(f"a stranger was told {said[:200]} and {models[:200]}")
