"""What the server tells systemd, on a real socket of a test.

READY, STATUS, STOPPING, and WATCHDOG while deliveries are sound.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import pytest

from kit.harness import NEWEST, Inconclusive, Server, wait_until
from kit.streams import Stream


class Systemd:
    """The socket that NOTIFY_SOCKET names, and the messages that came in on it."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self.socket.setblocking(False)
        self.environ = {"NOTIFY_SOCKET": name}
        self.heard = []

    def hears(self, *lines, timeout=60):
        def listen():
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.heard += self.socket.recv(4096).decode().splitlines()
            return all(any(x.startswith(line) for x in self.heard) for line in lines)

        return wait_until(listen, timeout)

    def forget(self):
        self.hears()
        self.heard.clear()


@pytest.fixture
def systemd(tmp_path):
    made = Systemd(str(tmp_path / "notify"))
    yield made
    made.socket.close()


@pytest.mark.guard("unseen_by_systemd")
def test_from_the_load_to_the_stop(line, faulty, tmp_path, systemd):
    model = faulty(kind="none", load_delay=60, delay=0.02)
    with Server(
        line, model.path, tmp_path / "log", args=model.args, environ=systemd.environ
    ) as server:
        assert systemd.hears("STATUS=loading", "EXTEND_TIMEOUT_USEC=60000000")
        assert "READY=1" not in systemd.heard
        model.hurry()
        assert systemd.hears("READY=1", "STATUS=serving")
        asked = systemd.heard.count("EXTEND_TIMEOUT_USEC=60000000")
        assert server.post({"prompt": "x", "max_tokens": 1})[0] == 200
        model.take_its_time()
        stream = Stream(server, {"prompt": "x", "max_tokens": 400})
        assert stream.first.wait(30)
        server.process.send_signal(signal.SIGTERM)
        assert systemd.hears("STOPPING=1", "STATUS=draining", timeout=10)
        assert not any(x.startswith("WATCHDOG") for x in systemd.heard), "nobody asked for it"
        assert systemd.heard.count("EXTEND_TIMEOUT_USEC=60000000") == asked, (
            "neither a run nor a stop is made longer"
        )
        model.hurry()
        assert stream.join().done
        assert server.wait_exit(30) == 0
        systemd.hears()
        assert [x for x in systemd.heard if x in ("READY=1", "STOPPING=1")] == [
            "READY=1",
            "STOPPING=1",
        ]


@pytest.mark.guard("unseen_by_systemd")
def test_signs_of_life_cease_with_deliveries(faulty, tmp_path):
    name = f"@mlx-lm-shim-test-{time.monotonic_ns()}"
    systemd = Systemd(name)
    model = faulty(kind="sleep_while_triggered", delay=0.02)
    environ = systemd.environ | {
        "WATCHDOG_USEC": "1000000",
        "MLX_SHIM_ON_STALL": "dump",
        "MLX_SHIM_DECODE_STALL": "1s",
    }
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert stream.first.wait(30)
        systemd.forget()
        time.sleep(3)
        systemd.hears()
        assert systemd.heard.count("WATCHDOG=1") >= 2
        model.fire()
        assert systemd.hears("STATUS=stalled")
        systemd.forget()
        time.sleep(2)
        systemd.hears()
        assert "WATCHDOG=1" not in systemd.heard
        model.trigger.unlink()
        assert systemd.hears("WATCHDOG=1", "STATUS=serving")
    systemd.socket.close()


@pytest.mark.guard("unseen_by_systemd")
@pytest.mark.control("unseen_by_systemd")
def test_without_a_model_it_is_ready_when_it_listens_and_control(tmp_path, systemd):
    with Server(NEWEST, None, tmp_path / "log", environ=systemd.environ):
        assert systemd.hears("READY=1")
    systemd.forget()
    off = systemd.environ | {"MLX_SHIM_UNSEEN_BY_SYSTEMD": "0"}
    with Server(NEWEST, None, tmp_path / "control", environ=off) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        time.sleep(1.5)
        systemd.hears()
        if systemd.heard:
            raise Inconclusive(f"stock tells systemd: {systemd.heard}")
