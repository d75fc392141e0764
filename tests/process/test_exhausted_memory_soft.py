"""A process holds memory that no request can free: above soft new requests get 503.

Where that does not help, the process is replaced.
"""

from __future__ import annotations

import json

import psutil
import pytest

from kit.harness import NEWEST, REPO, Inconclusive, Server, wait_until
from kit.streams import Stream

MIB = 2**20
LIMIT, TAKEN = 600 * MIB, 700 * MIB


class Beside:
    """A program in the server's process that takes and frees 700 MiB."""

    def __init__(self, line, model, folder, environ, grace=1000):
        self.line, self.model, self.folder, self.environ = line, model, folder, environ
        self.trigger, self.grace = folder / "trigger", grace

    def start(self):
        entry = (
            str(REPO / "tests" / "kit" / "programs" / "memory_hog.py"),
            str(self.trigger),
            str(self.grace),
        )
        log = self.folder / "log"
        return Server(
            self.line, self.model.path, log, entry=entry, args=self.model.args, environ=self.environ
        )

    def take(self):
        self.trigger.write_text(str(TAKEN))

    def free(self):
        self.trigger.unlink()


def resident(server):
    return psutil.Process(server.pid).memory_info().rss


def asked(server):
    """Status, headers and body, as a client sees them."""
    connection = server.connect()
    try:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1}))
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), json.loads(answer.read())
    finally:
        connection.close()


@pytest.fixture
def slow(faulty):
    """A model slow enough for a test to look at the server meanwhile."""
    return faulty(kind="none", delay=0.02)


@pytest.mark.guard("exhausted_memory")
def test_above_soft_nobody_new_is_let_in_until_it_is_less(line, slow, tmp_path):
    beside = Beside(line, slow, tmp_path, {"MLX_SHIM_MEMORY_SOFT": "600M"})
    with beside.start() as server:
        stream = Stream(server.ready(), {"prompt": "busy", "max_tokens": 1000})
        assert stream.first.wait(30)
        assert server.get("/health/ready")[0] == 200
        beside.take()
        assert wait_until(lambda: server.get("/health/ready")[0] == 503, 30)
        # A look may come when only half is taken. The next look sees the rest.
        assert wait_until(lambda: server.get("/health")[1]["memory"]["footprint"] > TAKEN, 30)
        status, headers, body = asked(server)
        assert (status, body["error"]["code"]) == (503, "memory_pressure")
        assert int(headers["Retry-After"]) > 0
        status, health = server.get("/health")
        assert (status, health["status"]) == (200, "ok"), "it lives: nobody is to end it for that"
        assert health["memory"]["short"] is True
        beside.free()
        assert wait_until(lambda: server.get("/health/ready")[0] == 200, 30)
        assert server.get("/health")[1]["memory"]["short"] is False
        assert asked(server)[0] == 200
        assert stream.thread.is_alive(), "all of that beside somebody who is served"
        slow.hurry()
        assert stream.join().done, "who was served already is served on"
        told = [x.rpartition(": ")[2] for x in server.shim_lines() if " in use (MLX" in x]
        assert told == [
            "the caches are trimmed",
            "new requests are 503 until it is less",
            "new requests are accepted again",
        ]


@pytest.mark.control("exhausted_memory")
def test_control_without_the_guard_it_is_served_on(line, slow, tmp_path):
    environ = {
        "MLX_SHIM_MEMORY_SOFT": "600M",
        "MLX_SHIM_MEMORY_HARD": "650M",
        "MLX_SHIM_EXHAUSTED_MEMORY": "0",
    }
    beside = Beside(line, slow, tmp_path, environ, grace=1)
    with beside.start() as server:
        server.ready()
        beside.take()
        assert wait_until(lambda: resident(server) > TAKEN, 30)
        if wait_until(lambda: not server.alive or asked(server)[0] != 200, 5):
            raise Inconclusive("without the guard it does not serve")


@pytest.mark.guard("exhausted_memory")
def test_above_soft_with_nobody_served_it_is_replaced(slow, tmp_path):
    beside = Beside(NEWEST, slow, tmp_path, {"MLX_SHIM_MEMORY_SOFT": "600M"}, grace=1)
    with beside.start() as server:
        server.ready()
        beside.take()
        assert server.wait_exit(30) == 75
        assert "with no request being served, soft is 600.0 MiB" in server.text()


@pytest.mark.guard("exhausted_memory")
def test_above_hard_those_served_are_told_and_it_is_replaced(line, slow, tmp_path):
    beside = Beside(line, slow, tmp_path, {"MLX_SHIM_MEMORY_HARD": "600M"}, grace=2)
    with beside.start() as server:
        stream = Stream(server.ready(), {"prompt": "busy", "max_tokens": 100_000})
        assert stream.first.wait(30)
        beside.take()
        assert server.wait_exit(60) == 75
        stream.join()
        assert not stream.done
        assert list(stream.events)[-1]["error"]["code"] == "memory_pressure"
        (ended,) = [x for x in server.shim_lines() if "is ended" in x]
        assert "still above hard" in ended
        assert "still above hard, 600.0 MiB; in flight: 0 finished, 0 cut short" in server.text()
