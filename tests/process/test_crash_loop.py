"""A server that keeps dying waits before it loads its model again, and says so.

Without the guard it starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

from kit.harness import KILLER, NEWEST, Inconclusive, Server, free_port, wait_until
from kit.streams import Stream

pytestmark = pytest.mark.usefixtures("killable")

# Seconds. It takes a fraction of one.
SOON = 5.0


class Place:
    """One port and one folder for the state, for the starts of one server."""

    def __init__(self, tmp_path, line, model, breaker):
        self.folder = tmp_path / "state"
        self.environ = {
            "MLX_SHIM_CRASH_LOOP": None,
            "MLX_SHIM_STATE_DIR": str(self.folder),
            "MLX_SHIM_BREAKER": breaker,
        }
        self.port = free_port()
        self._made = (line, model)
        self._tmp_path = tmp_path
        self._starts = 0

    def start(self, *, entry=("-m", "mlx_lm", "server"), args=(), **more):
        self._starts += 1
        log = self._tmp_path / f"log{self._starts}"
        return Server(
            *self._made, log, entry=entry, args=args, port=self.port, environ=self.environ | more
        )

    def state(self):
        (file,) = self.folder.glob("*.json")
        return json.loads(file.read_text())

    def statuses(self):
        return [status for _, status in self.state()["deaths"]]


def health(server, path="/health"):
    """(status, body), once the server answers at all."""
    answers = []

    def ask():
        assert server.alive, server.text()
        try:
            answers.append(server.get(path))
        except OSError:
            return False
        return True

    assert wait_until(ask, 60), server.text()
    return answers[-1]


def held(server):
    """What /health says while the start waits."""
    assert wait_until(lambda: health(server)[1]["status"] != "loading", 60)
    status, body = health(server)
    assert (status, body["status"]) == (503, "breaker"), server.text()
    return body


@pytest.mark.guard("crash_loop")
@pytest.mark.control("crash_loop")
def test_deaths_hold_the_next_start(tiny, tmp_path):
    place = Place(tmp_path, NEWEST, tiny, "2/10m,10s")
    for _ in range(2):
        with place.start() as server:
            server.ready().send_and_leave(KILLER)
            assert server.wait_exit() == 70
    assert place.statuses() == [70, 70]

    with place.start(MLX_SHIM_PREFILL_STALL="1s") as server:
        body = held(server)
        assert body["reason"] == "2 deaths, 2 of them within 600 s (the last: status 70)"
        assert 0 < body["seconds_left"] <= 11
        assert health(server, "/health/live")[0] == 200
        assert health(server, "/health/ready")[0] == 503
        refused_with_retry_after(server)
        server.ready()
        assert health(server)[0] == 200
        assert sum("before the model is loaded" in x for x in server.shim_lines()) == 1
        assert sum("the wait is over" in x for x in server.shim_lines()) == 1
        server.process.send_signal(signal.SIGINT)
        server.wait_exit()
        assert not any("fatal:" in x for x in server.shim_lines())
    assert place.statuses() == [70, 70], "an orderly stop is no death"
    assert place.state()["run"] is None

    with place.start() as server:
        server.ready()
        assert "before the model is loaded" not in server.text(), (
            "these deaths have been waited for"
        )
        assert wait_until(lambda: place.state()["run"][0] == "up", 30)
        assert place.state()["model"] > 2**20
        with Server(
            NEWEST, tiny, tmp_path / "other", port=place.port, environ=place.environ
        ) as other:
            assert other.wait_exit() == 71
        assert place.state()["run"][0] == "up", (
            "the second server with this port is none of its business"
        )
        os.kill(server.pid, signal.SIGKILL)
        server.wait_exit()

    with place.start() as server:
        body = held(server)
        assert place.statuses() == [70, 70, None]
        assert body["reason"].endswith("(the last: it was killed or crashed)")
        assert 11 < body["seconds_left"] <= 22
        server.process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        assert server.wait_exit() in (0, -signal.SIGABRT), "as stock"
        assert time.monotonic() - asked < SOON, "a stop does not wait for the end of the wait"
        assert "Traceback" not in server.text()

    before = place.state()
    with place.start(MLX_SHIM_CRASH_LOOP="0") as server:
        server.ready()
        if "before the model is loaded" in server.text():
            raise Inconclusive("it waited without the guard")
    assert place.state() == before, "no file is written"


def refused_with_retry_after(server):
    connection = server.connect()
    connection.request(
        "POST", "/v1/completions", json.dumps({"prompt": "x"}), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 503
    assert 0 < int(answer.headers["Retry-After"]) <= 11
    assert json.loads(answer.read())["error"]["code"] == "breaker"
    connection.close()


ENDS = """
import os, pathlib, sys, time
from mlx_lm import server
def serve(host, port, generator, **_):
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
    if "{how}" == "without a word":
        os._exit(0)
    # Not by stop_and_join, which notes a stop by itself.
    generator._stop = True
    generator.join()
server._run_http_server = serve
server.main()
"""


@pytest.mark.guard("crash_loop")
@pytest.mark.parametrize("how", ["by itself", "without a word"])
def test_a_program_that_ends_by_itself_has_not_died(how, tiny, tmp_path):
    """And the next start does not take it for killed. Where no end was noted (control), it does."""
    program = tmp_path / "program.py"
    program.write_text(ENDS.format(how=how))
    place = Place(tmp_path, NEWEST, tiny, "1/10m")
    with place.start(entry=(str(program),)) as server:
        assert wait_until(
            lambda: list(place.folder.glob("*.json")) and place.state()["run"][0] == "up", 60
        )
        (tmp_path / "enough").touch()
        # mlx's own teardown may abort.
        server.wait_exit(30)
        assert place.statuses() == []
        if how == "by itself":
            assert place.state()["run"] is None
        elif place.state()["run"] is None:
            raise Inconclusive("an end without a word is noted")


QUEUED = """
import pathlib, sys, time
from mlx_lm import server
module = lambda name: next(m for n, m in sys.modules.items() if n.endswith(name))
# A waiting handler looks around when it begins to wait, and not again before the stop.
module("shim.engine.queues").POLL = 60.0
# The generation thread is the first to see the stop.
module("shim.engine.drain").on_begin.append(lambda: time.sleep(0.5))
crash_loop = module("guards.crash_loop")
stock = crash_loop.wait
def wait(*args):
    while not pathlib.Path("queued").exists():
        time.sleep(0.02)
    stock(*args)
crash_loop.wait = wait
server.main()
"""


@pytest.mark.guard("crash_loop")
def test_a_stop_while_a_start_waits_and_a_request_is_queued(line, faulty, tmp_path):
    """The request came before the wait began. It is told, and nothing is loaded for it."""
    model = faulty(kind="none", load_delay=20)
    program = tmp_path / "program.py"
    program.write_text(QUEUED)
    place = Place(tmp_path, line, model.path, "1/10m,60s")
    with place.start(args=model.args) as server:
        assert wait_until(model.loaded.exists, 60)
        os.kill(server.pid, signal.SIGKILL)
        server.wait_exit()
    loads = model.loads
    with place.start(args=model.args, entry=(str(program),)) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        stream = Stream(server, {"prompt": "early"})
        assert wait_until(lambda: health(server)[1]["in_flight"] == 1, 10)
        (tmp_path / "queued").touch()
        held(server)
        asked = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(30) == 0
        took = time.monotonic() - asked
        print(f"{line}: {took:.2f} s from SIGTERM to the end")
        assert took < SOON
        assert stream.join().status == 503
        assert json.loads(stream.lines[-1])["error"]["code"] == "shutting_down"
        assert model.loads == loads
        assert "Traceback" not in server.text()
        assert not any("fatal:" in x for x in server.shim_lines())
    assert (place.statuses(), place.state()["run"][0]) == ([None], "waiting"), (
        "the next start waits for what is left"
    )


# The wait ends as if its time were over, as soon as the test has seen it.
CUT_SHORT = """
import pathlib, sys
from mlx_lm import server
crash_loop = next(m for n, m in sys.modules.items() if n.endswith("guards.crash_loop"))
stock = crash_loop.wait
crash_loop.wait = lambda why, seconds: stock(why, seconds, pathlib.Path("seen").exists)
server.main()
"""


@pytest.mark.guard("crash_loop")
@pytest.mark.control("crash_loop")
def test_boot_failures_count(line, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(CUT_SHORT)
    place = Place(tmp_path, line, "/nonexistent", "2/10m,60s")
    for _ in range(2):
        with place.start() as server:
            assert server.wait_exit() == 78
    with place.start(entry=(str(program),)) as server:
        assert held(server)["reason"].endswith("(the last: status 78)")
        (tmp_path / "seen").touch()
        assert server.wait_exit() == 78
    assert place.statuses() == [78, 78, 78]
    with place.start(MLX_SHIM_CRASH_LOOP="0") as server:
        assert server.wait_exit() == 78
        if "before the model is loaded" in server.text():
            raise Inconclusive("it waited without the guard")
    assert place.statuses() == [78, 78, 78], "no file is written"


FILE_SYSTEMS = {
    "full": 'mount -t tmpfs -o size=4k none "$0" && head -c 4096 /dev/zero > "$0/x"',
    "no room for a name": 'mount -t tmpfs -o nr_inodes=1 none "$0"',
    "read-only": 'mount -t tmpfs -o ro none "$0"',
}


@pytest.mark.guard("crash_loop")
@pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces are Linux's")
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_folder_that_cannot_be_written_is_in_nobodys_way(tiny, tmp_path, kind):
    place = Place(tmp_path, NEWEST, tiny, "1/10m")
    place.folder.mkdir()
    script = f'{FILE_SYSTEMS[kind]} && exec "$@"'
    prefix = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        str(place.folder),
    )
    with Server(NEWEST, tiny, tmp_path / "log", environ=place.environ, prefix=prefix) as server:
        server.ready().send_and_leave(KILLER)
        assert server.wait_exit(30) == 70
        assert sum("deaths cannot be noted" in x for x in server.shim_lines()) == 1


# The start waits for more memory than the machine has, so that the free memory never suffices.
FORGETFUL = """
import sys
from mlx_lm import server
next(m for n, m in sys.modules.items() if n.endswith("guards.crash_loop")).LARGEST_SHARE = 2.0
server.main()
"""


@pytest.mark.guard("crash_loop")
def test_a_kill_with_a_large_model_loaded_and_a_long_good_run(tiny, tmp_path):
    """The next start waits for its death, then for its memory.

    Once it has been up for long enough nothing is remembered.
    """
    program = tmp_path / "program.py"
    program.write_text(FORGETFUL)
    place = Place(tmp_path, NEWEST, tiny, "1/10m,1s")
    begun = time.monotonic()
    with place.start() as server:
        server.ready()
        # A start comes well within it, and so does its look at the death.
        window = 3 + 2 * (time.monotonic() - begun)
        os.kill(server.pid, signal.SIGKILL)
        server.wait_exit()
    (file,) = place.folder.glob("*.json")
    file.write_text(json.dumps(place.state() | {"model": 1e13}))

    with place.start(entry=(str(program),), MLX_SHIM_BREAKER=f"1/{window:.0f}s,2s") as server:
        assert held(server)["reason"].startswith("1 deaths, 1 of them within ")
        freed = "the last run was killed, and of the "
        assert wait_until(lambda: health(server)[1].get("reason", "").startswith(freed), 30), (
            server.text()
        )
        body = held(server)
        assert body["reason"].startswith(freed)
        assert 0 < body["seconds_left"] <= 60
        server.ready()
        up = time.monotonic()
        assert health(server)[0] == 200
        assert sum(" are free, no more: the wait is over" in x for x in server.shim_lines()) == 1
        assert place.statuses() == [None], "a good run is a long one"
        assert wait_until(lambda: place.statuses() == [], 60), server.text()
        assert time.monotonic() - up > window / 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(30) == 0

    with place.start() as server:
        server.ready()
        assert "before the model is loaded" not in server.text()
        assert place.statuses() == []
