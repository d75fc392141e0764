"""The documented HAProxy in front of two servers, whose engines die in turn: its clients, who never try again, see nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess

import headline
from conftest import FaultyModel
from harness import LINES, Inconclusive, clean_environ, free_port, need, wait_until

# What a machine that is busy with other tests takes now and then is no reason to call a server dead, or to start it anew.
SHORT = ("timeout connect 2s", "timeout check 2s")
STALLS = {"MLX_SHIM_DECODE_STALL": "3s", "MLX_SHIM_PREFILL_STALL": "10s"}
RETRIES = ("option redispatch", "retries ", "retry-on ")


@contextlib.contextmanager
def haproxy(folder, servers, *, retries: bool):
    """The recipe of docs/supervision.md with other addresses, and patient; yields its port, once it listens there."""
    port = free_port()
    config = headline.recipe("backend servers").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    for address, server in zip(("192.0.2.1:8080", "192.0.2.2:8080"), servers, strict=True):
        assert address in config
        config = config.replace(address, f"127.0.0.1:{server.port}")
    for timeout in SHORT:
        assert timeout in config
        config = config.replace(timeout, timeout.replace("2s", "20s"))
    kept = [x for x in config.splitlines() if retries or not x.strip().startswith(RETRIES)]
    path = folder / f"haproxy{retries}"
    path.write_text("\n".join([*kept, ""]))
    with path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [need("haproxy"), "-db", "-f", str(path)], stdout=log, stderr=log, env=clean_environ()
        )
    try:
        assert wait_until(lambda: listens(port), 30), path.with_suffix(".log").read_text()
        yield port
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
        for line in LINES:  # one of each
            model = FaultyModel(tmp_path / line, kind=headline.RAISES, once=True, delay=0.005)
            folder = tmp_path / f"supervised-{line}"
            server = headline.Supervised(line, model, folder, hand_over=False, environ=STALLS)
            servers.append(stack.enter_context(server))
        for server in servers:
            server.ready()
        crowd = headline.Crowd(stack.enter_context(haproxy(tmp_path, servers, retries=True)), retries=0)
        control = headline.Crowd(stack.enter_context(haproxy(tmp_path, servers, retries=False)), clients=4, retries=0)
        for n, kind in enumerate([headline.KILLS, headline.RAISES, headline.KILLS, headline.STALLS]):
            crowd.settle()
            server, before = servers[n % 2], servers[n % 2].deaths
            server.die(kind)  # not through HAProxy, which would have the other one die of it as well
            assert wait_until(lambda server=server, before=before: server.deaths > before, 60), server.text()[-3000:]
            assert wait_until(lambda server=server: at_work(server), headline.PATIENCE)
        assert [crowd.leave(), control.leave()] == [0, 0]
        print(f"\n{crowd.answers} answers; without retries {control.answers} and {len(control.errors)} errors")
        assert crowd.errors == [], [repr(error.__cause__) for error in crowd.errors] + [
            s.text()[-3000:] for s in servers
        ]
        if not control.errors:
            raise Inconclusive("no client saw an error without retries either")


def at_work(server):
    """Whether it lives again, and HAProxy sends it requests."""
    try:
        return server.get("/health")[1]["counters"]["finished"] > 8
    except OSError:
        return False


def test_the_recipe_is_accepted_as_it_is(tmp_path):
    path = tmp_path / "haproxy.cfg"
    path.write_text(headline.recipe("backend servers"))
    checked = subprocess.run([need("haproxy"), "-c", "-f", str(path)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert b"WARNING" not in checked.stderr + checked.stdout
