"""/health and /v1/models tell the truth.

Loading, stalled and dead are also in the tests of their causes.
"""

from __future__ import annotations

import signal
import socket
import time

import pytest

from kit.harness import Inconclusive, Server, wait_until
from kit.streams import Stream

OFF = {"MLX_SHIM_UNTRUTHFUL_HEALTH": "0"}


@pytest.mark.guard("untruthful_health")
def test_what_it_says_when_all_is_well(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log") as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 3000})
        assert stream.first.wait(30)
        status, body = server.get("/health")
        assert status == 200
        assert body["status"] == "ok"
        assert body["in_flight"] >= 0
        assert body["seconds_since_delivery"] is not None
        assert body["uptime"] > 0
        assert body["guards"]["generation_death"] == "active"
        assert (
            server.get("/health?x=1")[0]
            == server.get("/health/live")[0]
            == server.get("/health/ready")[0]
            == 200
        )


@pytest.mark.guard("untruthful_health")
def test_an_http_0_9_client(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log") as server:
        server.ready()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as s:
            s.sendall(b"GET /health\r\n\r\n")
            assert s.recv(10_000).startswith(b'{"status": "ok"')


@pytest.mark.guard("untruthful_health")
def test_draining(line, faulty, tmp_path):
    """SIGINT while a request is served alone: stock waits for it, and says ok meanwhile."""
    model = faulty(kind="none", delay=0.05)
    with Server(line, model.path, tmp_path / "log", args=model.args) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000, "seed": 1})
        assert stream.first.wait(30)
        connection = server.connect()
        connection.connect()
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)
        assert wait_until(lambda: server.get("/health")[1]["status"] == "draining", 10)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert answer.status == 503
        assert b"draining" in answer.read()


@pytest.mark.control("untruthful_health")
def test_control_stock_says_ok_while_the_model_loads(line, faulty, tmp_path):
    model = faulty(kind="none", load_delay=10)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=OFF) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        if server.get("/health") != (200, {"status": "ok"}):
            raise Inconclusive(f"stock says {server.get('/health')}")
