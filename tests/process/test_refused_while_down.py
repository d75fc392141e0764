"""A supervisor holds the socket: clients that connect while no server lives wait for the next."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket

import pytest

from kit.harness import KILLER, NEWEST, Inconclusive, Server, python_of, wait_until

PASSED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""
DEADLY = {"MLX_SHIM_BAD_REQUEST": "0", "MLX_SHIM_KILLER_REQUEST": "0"}
# Connections, twice: more than the supervisor of these tests and stock have asked the kernel for.
WAITING = 100
READY = {"prompt": "x", "max_tokens": 2}


def serving_on(passed: socket.socket, line, model, log, **options) -> Server:
    """A server to which `passed` is handed over as a supervisor would do it."""
    prefix = (python_of(NEWEST), "-c", PASSED, str(passed.fileno()))
    environ = {**DEADLY, **options.pop("environ", {})}
    return Server(
        line, model, log, prefix=prefix, pass_fds=(passed.fileno(),), environ=environ, **options
    )


@pytest.fixture
def held():
    with socket.create_server(("127.0.0.1", 0), backlog=100) as s:
        yield s


def answer_of(connection: socket.socket) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.body = json.loads(answer.read())
    return answer


@pytest.mark.guard("refused_while_down")
def test_who_connects_while_it_is_down_is_answered_by_the_next(line, tiny, tmp_path, held):
    port = held.getsockname()[1]
    with serving_on(held, line, tiny, tmp_path / "first", port=port) as first:
        first.ready()
        os.kill(first.pid, signal.SIGSTOP)
        # No process has taken these out of the queue.
        queued = [first.send_and_leave(READY) for _ in range(WAITING)]
        os.kill(first.pid, signal.SIGKILL)
        first.wait_exit()
        # No server lives.
        queued += [first.send_and_leave(READY) for _ in range(WAITING)]
        environ = {"MLX_SHIM_EXIT_GRACE": "10s"}
        with serving_on(
            held, line, tiny, tmp_path / "second", port=port, environ=environ
        ) as second:
            assert [answer_of(connection).status for connection in queued] == [200] * len(queued)
            killer = answer_of(second.send_and_leave(KILLER))
            assert (killer.status, killer.body["error"]["code"]) == (503, "engine_dead")
            assert killer.headers["Retry-After"] == "1"
            assert second.wait_exit(30) == 70
            assert second.send_and_leave(READY).getpeername()[1] == port, "not refused"
            (said,) = [x for x in second.shim_lines() if "passed" in x]
            assert said.endswith(f"serving on the passed socket 127.0.0.1:{port}")
            assert f"Starting httpd at 127.0.0.1 on port {port}" in second.text()


@pytest.mark.control("refused_while_down")
def test_control_without_the_guard_the_port_is_taken(line, tiny, tmp_path, held):
    environ = {"MLX_SHIM_REFUSED_WHILE_DOWN": "0"}
    with serving_on(
        held, line, tiny, tmp_path / "log", port=held.getsockname()[1], environ=environ
    ) as server:
        if server.wait_exit() != 71:
            raise Inconclusive("stock serves on a passed socket by itself")


REPORTS = """
import os, threading, time
from mlx_lm.server import main
def show(*_):
    open("dying", "w").close()
    while not os.path.exists("asked"):
        time.sleep(0.02)
threading.excepthook = show
main()
"""


@pytest.mark.guard("refused_while_down")
def test_who_has_been_let_in_is_answered_and_nobody_else_is_let_in(tiny, tmp_path, held):
    """While a dying process reports: the hook that prints takes until the test has asked."""
    program = tmp_path / "program.py"
    program.write_text(REPORTS)
    port = held.getsockname()[1]
    environ = {"MLX_SHIM_EXIT_GRACE": "20s"}
    options = {"port": port, "entry": (str(program),), "environ": environ}
    with serving_on(held, NEWEST, tiny, tmp_path / "log", **options) as server:
        early = socket.create_connection(("127.0.0.1", port))
        server.ready().send_and_leave(KILLER)
        assert wait_until((tmp_path / "dying").exists, 10, 0.01)
        late = server.send_and_leave(READY)
        raw = b"GET /health HTTP/1.1\r\n\r\n"
        early.sendall(raw)
        assert answer_of(early).body["status"] == "dead"
        assert server.alive
        (tmp_path / "asked").touch()
        early.close()
        assert server.wait_exit(30) == 70
        held.settimeout(5)
        # As the next process would.
        taken, address = held.accept()
        assert address == late.getsockname()
        with contextlib.closing(taken):
            assert taken.recv(100).startswith(b"POST ")


PATIENT = """
import sys, threading
from mlx_lm.server import main
fatal = next(module for name, module in sys.modules.items() if name.endswith("shim.engine.fatal"))
# The test may be slow to ask.
fatal.ACCEPTED_GRACE = 20.0
def tell():
    while not fatal.begun(1):
        pass
    open("ending", "w").close()
threading.Thread(target=tell, daemon=True).start()
main()
"""


@pytest.mark.guard("refused_while_down", "abrupt_stop")
@pytest.mark.control("abrupt_stop")
@pytest.mark.parametrize("drains", ["1", "0"])
def test_who_was_let_in_as_an_orderly_end_began_is_told(drains, tiny, tmp_path, held):
    """Connections that had not asked yet. No successor can answer them.

    Without a handler of SIGTERM they are cut.
    """
    program = tmp_path / "program.py"
    program.write_text(PATIENT)
    port = held.getsockname()[1]
    options = {"port": port, "entry": (str(program),), "environ": {"MLX_SHIM_ABRUPT_STOP": drains}}
    with serving_on(held, NEWEST, tiny, tmp_path / "log", **options) as server:
        early = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(2)]
        server.sockets += early
        # This request came after them: they have been let in.
        server.ready()
        server.process.send_signal(signal.SIGTERM)
        if drains == "0":
            server.wait_exit(30)
            if any(answered(connection) for connection in early):
                raise Inconclusive("stock answers who has connected before it ends")
            return
        assert wait_until((tmp_path / "ending").exists, 30, 0.01)
        assert server.alive
        for connection in early:
            connection.sendall(post(READY))
            answer = answer_of(connection)
            assert (answer.status, answer.body["error"]["code"]) == (503, "draining")
            assert answer.headers["Retry-After"] == "1"
            # Else the server would wait for it.
            connection.close()
        assert server.wait_exit(10) == 0, "it does not wait for longer than anybody is there"


def post(body):
    raw = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw


def answered(connection):
    try:
        connection.sendall(post(READY))
        return bool(connection.recv(1))
    except OSError:
        return False


@pytest.mark.guard("refused_while_down")
def test_a_unix_socket(tiny, tmp_path):
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(tmp_path / "socket"))
        held.listen()
        with serving_on(
            held, NEWEST, tiny, tmp_path / "log", environ={"MLX_SHIM_LAUNCHD_SOCKET": ""}
        ) as server:
            for raw, status in ((json.dumps(READY).encode(), 200), (b"{", 400)):
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(90)
                    client.connect(str(tmp_path / "socket"))
                    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(raw)
                    client.sendall(head + raw)
                    assert answer_of(client).status == status
            assert (
                f"serving on the passed socket unix:{tmp_path}/socket, not on --port {server.port}"
                in server.text()
            )
            assert "unix - - [" in server.text()


@pytest.mark.guard("refused_while_down")
def test_a_socket_that_cannot_be_used_is_78(line, tiny, tmp_path):
    with (
        socket.socket(type=socket.SOCK_DGRAM) as held,
        serving_on(held, line, tiny, tmp_path / "log") as server,
    ):
        assert server.wait_exit() == 78
        (said,) = [x for x in server.shim_lines() if "fatal:" in x]
        assert "the socket to serve on cannot be used: descriptor 3 is a socket of the type" in said
