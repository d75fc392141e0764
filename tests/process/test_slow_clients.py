"""Clients that trickle, fall silent or hang up while they send: cut, with no harm to others."""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.harness import NEWEST, Inconclusive, Server, wait_until
from kit.wire import head, read_all

# Seconds of patience of a client that sends too slowly.
PATIENCE = 8.0


def trickle(s, start, byte):
    """Send `start`, and then a byte ten times a second until the server hangs up or answers.

    True when it did.
    """
    deadline = time.monotonic() + PATIENCE
    with s:
        s.settimeout(0.1)
        piece = start
        while time.monotonic() < deadline:
            try:
                s.sendall(piece)
                s.recv(1)
            except TimeoutError:
                piece = byte
            except OSError:
                return True
            else:
                return True
    return False


@pytest.mark.guard("slow_client")
@pytest.mark.control("slow_client")
@pytest.mark.parametrize(
    "environ", [{"MLX_SHIM_READ_TIMEOUT": "2s"}, {"MLX_SHIM_SLOW_CLIENT": "0"}], ids=["on", "off"]
)
def test_slow_clients(line, environ, faulty, tmp_path):
    """Silent, or trickling, in its headers or its body: cut. A slow reader of a stream is not."""
    on = "MLX_SHIM_READ_TIMEOUT" in environ
    model = faulty(kind="none", delay=0.01)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        server.ready()

        def connect():
            return socket.create_connection(("127.0.0.1", server.port), timeout=10)

        reader = connect()
        body = json.dumps({"prompt": "slow reader", "max_tokens": 300, "stream": True}).encode()
        reader.sendall(head(len(body)) + body)
        with ThreadPoolExecutor(6) as clients:
            asked = {
                "silent": clients.submit(was_cut, connect(), b""),
                "silent after a header": clients.submit(
                    was_cut, connect(), b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                ),
                "silent after the headers": clients.submit(was_cut, connect(), head(100)),
                "silent in the body": clients.submit(was_cut, connect(), head(100) + b"{"),
                "trickle in the headers": clients.submit(
                    trickle, connect(), b"GET /health HTTP/1.1\r\nX: ", b"a"
                ),
                "trickle in the body": clients.submit(trickle, connect(), head(100) + b"{", b" "),
            }
        cut = {how: client.result() for how, client in asked.items()}
        if on:
            assert all(cut.values()), cut
            assert b" 408 " in ended(connect(), head(100) + b"{")
        elif any(cut.values()):
            raise Inconclusive(f"stock cuts by itself: {cut}")
        stream = b""
        while piece := reader.recv(200):
            stream += piece
            time.sleep(0.005)
        reader.close()
        assert b"data: [DONE]" in stream
        assert server.post({"prompt": "afterwards", "max_tokens": 1})[0] == 200


def was_cut(s, data):
    with s:
        s.sendall(data)
        s.settimeout(PATIENCE)
        try:
            while s.recv(65536):
                pass
        except TimeoutError:
            return False
        return True


def ended(s, data):
    with s:
        s.sendall(data)
        return read_all(s)


@pytest.mark.guard("slow_client")
def test_three_hundred_slow_clients_go_and_others_are_served(tiny, tmp_path):
    """Slowloris."""
    with Server(NEWEST, tiny, tmp_path / "log", environ={"MLX_SHIM_READ_TIMEOUT": "3s"}) as server:
        server.ready()
        slow = []
        for _ in range(300):
            slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            slow[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")
            # The stock server listens with a backlog of five. A client that overflows it waits for
            # a second.
            time.sleep(0.003)
        assert server.post({"prompt": "beside", "max_tokens": 2})[0] == 200
        assert server.get("/health")[0] == 200
        for s in slow:
            assert not s.recv(1)
            s.close()
        assert wait_until(lambda: threads(server.pid) < 30, 10)
        assert server.post({"prompt": "afterwards", "max_tokens": 2})[0] == 200


def threads(pid):
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in status if x.startswith("Threads:"))


@pytest.mark.guard("slow_client")
def test_a_client_that_is_gone_at_once_leaves_nothing(tiny, tmp_path):
    with Server(NEWEST, tiny, tmp_path / "log") as server:
        server.ready()
        for data in (b"", b"G", head(10**9), head(10)):
            with socket.create_connection(("127.0.0.1", server.port)) as s:
                s.sendall(data)
        with pytest.raises(http.client.HTTPException):
            server.post(b"x", path="/v1/completions HTTP/9.9\r\n")
        assert server.post({"prompt": "afterwards", "max_tokens": 1})[0] == 200
        assert "Traceback" not in server.text()
