"""The documented HAProxy before two servers, whose engines die in turn: its clients see nothing.

The clients never try again.
"""

from __future__ import annotations

import contextlib
import csv
import socket
import subprocess
import time
import urllib.request

from conftest import FaultyModel
from kit import headline
from kit.harness import LINES, Inconclusive, Server, clean_environ, free_port, need, wait_until
from kit.streams import Stream

# A machine that is busy with other tests is slow now and then. That is not a reason to call a
# server dead, or to start it again.
SHORT = ("timeout connect 2s", "timeout check 2s")
STALLS = {"MLX_SHIM_DECODE_STALL": "3s", "MLX_SHIM_PREFILL_STALL": "10s"}
RETRIES = ("option redispatch", "retries ", "retry-on ")
# Seconds. `timeout queue` is a minute.
SOON = 10.0


STATS = """
listen stats
    bind 127.0.0.1:{port}
    stats enable
    stats uri /stats
"""


class Front(Server):
    """An HAProxy. The process that answers on its port is not a child of it."""

    def __init__(self, port, stats):
        self.port, self.sockets, self._stats = port, [], stats

    def sends_to_all(self):
        """Whether it says that each of its servers is up. It looks at each once a second."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._stats}/stats;csv", timeout=30
        ) as answer:
            rows = list(csv.DictReader(answer.read().decode().removeprefix("# ").splitlines()))
        states = [
            row["status"]
            for row in rows
            if row["pxname"] == "servers" and row["svname"] != "BACKEND"
        ]
        assert len(states) == len(LINES), rows
        return all(state == "UP" for state in states)


@contextlib.contextmanager
def haproxy(folder, servers, *, retries: bool):
    """The recipe of docs/haproxy.md, with other addresses and longer timeouts. Yields a Front.

    Without `retries` it is the control. There it does not tell servers either that a client has
    left.
    """
    port, stats = free_port(), free_port()
    config = headline.recipe("backend servers", "haproxy.md").replace(
        "127.0.0.1:8000", f"127.0.0.1:{port}"
    )
    for address, server in zip(("192.0.2.1:8080", "192.0.2.2:8080"), servers, strict=True):
        assert address in config
        config = config.replace(address, f"127.0.0.1:{server.port}")
    for timeout in SHORT:
        assert timeout in config
        config = config.replace(timeout, timeout.replace("2s", "20s"))
    if not retries:
        config = config.replace("option abortonclose", "no option abortonclose")
    kept = [x for x in config.splitlines() if retries or not x.strip().startswith(RETRIES)]
    path = folder / f"haproxy{retries}"
    path.write_text("\n".join([*kept, ""]) + STATS.format(port=stats))
    with path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [need("haproxy"), "-db", "-f", str(path)], stdout=log, stderr=log, env=clean_environ()
        )
    try:
        assert wait_until(lambda: listens(port) and listens(stats), 30), path.with_suffix(
            ".log"
        ).read_text()
        yield Front(port, stats)
        assert process.poll() is None, path.with_suffix(".log").read_text()
    finally:
        process.kill()
        process.wait()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_no_client_sees_that_an_engine_died(tmp_path):
    need("haproxy")
    with contextlib.ExitStack() as stack:
        servers = []
        # One server of each line.
        for line in LINES:
            model = FaultyModel(tmp_path / line, kind=headline.RAISES, once=True, delay=0.005)
            folder = tmp_path / f"supervised-{line}"
            server = headline.Supervised(line, model, folder, hand_over=False, environ=STALLS)
            servers.append(stack.enter_context(server))
        for server in servers:
            server.ready()
        front, bare = (
            stack.enter_context(haproxy(tmp_path, servers, retries=r)) for r in (True, False)
        )
        who_leaves_is_not_served_any_more(front, bare, servers)
        streams_that_have_not_begun(front, servers[0])
        crowd = headline.Crowd(front.port, retries=0)
        control = headline.Crowd(bare.port, clients=4, retries=0)
        for n, kind in enumerate([headline.KILLS, headline.KILLS, headline.STALLS]):
            crowd.settle()
            server, before = servers[n % 2], servers[n % 2].deaths
            # Not through HAProxy, which would send the request to the other server as well.
            server.die(kind)
            assert wait_until(lambda server=server, before=before: server.deaths > before, 60), (
                server.text()[-3000:]
            )
            # Else the next death may leave no server.
            server.ready()
            assert wait_until(front.sends_to_all, headline.PATIENCE)
        assert [crowd.leave(), control.leave()] == [0, 0]
        print(
            f"\n{crowd.answers} answers; without retries {control.answers} and "
            f"{len(control.errors)} errors"
        )
        assert crowd.errors == [], [repr(error.__cause__) for error in crowd.errors] + [
            s.text()[-3000:] for s in servers
        ]
        if not control.errors:
            raise Inconclusive("no client saw an error without retries either")
        without_a_server(front, servers)


def who_leaves_is_not_served_any_more(front, bare, servers):
    """`abortonclose`. Without it the server computes for a client that has left."""

    def told(what):
        return sum(server.get("/health")[1]["counters"][what] for server in servers)

    def leaves(asked, seconds):
        requests, abandoned = told("requests"), told("abandoned")
        # This takes some five seconds.
        connection = asked.send_and_leave({"prompt": "x", "max_tokens": 500})
        assert wait_until(lambda: told("requests") > requests, 30)
        connection.close()
        return wait_until(lambda: told("abandoned") > abandoned, seconds)

    assert leaves(front, 30), "its generation stops"
    if leaves(bare, 1.5):
        raise Inconclusive("a server learns that a client has left without it too")


def streams_that_have_not_begun(front, server):
    """One of two goes to the server, which dies of its prompt: the other server answers it."""
    before = server.deaths
    server.die(headline.RAISES)
    streams = [Stream(front, {"prompt": f"stream {n}", "max_tokens": 50}) for n in range(2)]
    assert [(s.join().status, s.done) for s in streams] == [(200, True)] * 2
    if server.deaths == before:
        raise Inconclusive("no stream came to the server that dies")
    server.ready()


def without_a_server(front, servers):
    """Once HAProxy knows, it says so at once: no client waits for `timeout queue`."""
    for server in servers:
        server.process.terminate()
    for server in servers:
        server.wait_exit(60)
    request = {"prompt": "x", "max_tokens": 1}
    assert wait_until(lambda: "No server is available" in front.post(request)[1], 60)
    asked = time.monotonic()
    assert front.post(request)[0] == 503
    assert time.monotonic() - asked < SOON


def test_the_recipe_is_accepted_as_it_is(tmp_path):
    path = tmp_path / "haproxy.cfg"
    path.write_text(headline.recipe("backend servers", "haproxy.md"))
    checked = subprocess.run(
        [need("haproxy"), "-c", "-f", str(path)], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert b"WARNING" not in checked.stderr + checked.stdout
