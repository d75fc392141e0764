"""SIGTERM and SIGINT: requests in flight finish, other clients are told, the status is 0.

A second signal does not wait.
"""

from __future__ import annotations

import json
import signal
import textwrap
import threading
import time

import pytest

from kit.harness import NEWEST, Inconclusive, Server, wait_until
from kit.streams import Stream

OFF = {"MLX_SHIM_ABRUPT_STOP": "0"}
# Tokens: more than any test waits for.
LONG = 100_000
# Seconds. It takes a fraction of one.
SOON = 5.0
# The docs promise half a second for an idle server.
HALF = 0.5
# Long enough to tell every client. The process ends as soon as that is done.
PATIENT = {"MLX_SHIM_EXIT_GRACE": "10s"}
# The stock server, with one name in shim/engine/drain.py set to a value that suits a test on a busy
# machine.
WITH_DRAIN = """
import sys
from mlx_lm.server import main
modules = sys.modules.items()
next(m for name, m in modules if name.endswith("shim.engine.drain")).{name} = {value}
main()
"""


def start(server, count, **body):
    streams = []
    # The stock server listens with a backlog of five.
    for n in range(count):
        streams.append(Stream(server, {"prompt": f"stream {n}", **body}))
        time.sleep(0.03)
    assert all(s.first.wait(60) for s in streams)
    return streams


def ask(server, number):
    server.process.send_signal(number)
    return time.monotonic()


def with_drain(tmp_path, name, value):
    program = tmp_path / "program.py"
    program.write_text(WITH_DRAIN.format(name=name, value=value))
    return (str(program),)


def last_line(server):
    (said,) = [x for x in server.shim_lines() if "stopped: " in x]
    return said


def told(stream):
    """The code of the error that ended a stream: in its last event, else in its body."""
    assert not stream.join().done
    return json.loads(stream.lines[-1 if stream.status != 200 else -2].removeprefix("data: "))[
        "error"
    ]["code"]


@pytest.mark.guard("abrupt_stop")
def test_those_in_flight_finish_and_newcomers_are_refused(line, faulty, tmp_path):
    model = faulty(kind="none", delay=0.03)
    with Server(line, model.path, tmp_path / "log", args=model.args) as server:
        streams = start(server.ready(), 16, max_tokens=400)
        ask(server, signal.SIGTERM)
        assert wait_until(lambda: server.get("/health")[1]["status"] == "draining", 5)
        assert server.get("/health/live")[0] == 200
        assert server.get("/health/ready")[0] == 503
        connection = server.connect()
        connection.request(
            "POST", "/v1/completions", b'{"prompt": "new"}', {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "draining")
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.headers["Connection"] == "close"
        assert any(s.thread.is_alive() for s in streams), "all of that while the streams go on"
        model.hurry()
        assert all(s.join().done for s in streams)
        assert server.wait_exit(30) == 0
        assert "SIGTERM; in flight: 16 finished, 0 cut short" in last_line(server)
        assert not any("fatal:" in x for x in server.shim_lines())


@pytest.mark.control("abrupt_stop")
def test_control_sigterm_cuts_every_stream(line, faulty, tmp_path):
    model = faulty(kind="none", delay=0.03)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=OFF) as server:
        streams = start(server.ready(), 4, max_tokens=LONG)
        ask(server, signal.SIGTERM)
        status = server.wait_exit(30)
        whole = sum(s.join().done for s in streams)
        if status != -signal.SIGTERM or whole:
            raise Inconclusive(f"stock ended with {status}, and {whole} streams were whole")


@pytest.mark.guard("abrupt_stop")
def test_a_drain_too_short_for_them(line, faulty, tmp_path):
    """Two in the batch, and one that waits to be served alone after them."""
    model = faulty(kind="none", delay=0.03)
    environ = {"MLX_SHIM_DRAIN": "1s", **PATIENT}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        streams = start(server.ready(), 2, max_tokens=LONG)
        queued = Stream(server, {"prompt": "alone", "max_tokens": 5, "seed": 1})
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 3, 10)
        asked = ask(server, signal.SIGINT)
        assert [told(s) for s in (*streams, queued)] == ["shutting_down"] * 3
        assert queued.status == 503
        assert server.wait_exit(30) == 0
        assert time.monotonic() - asked < 15
        assert "SIGINT; in flight: 0 finished, 3 cut short" in last_line(server)


@pytest.mark.guard("abrupt_stop")
def test_one_that_is_served_alone_and_a_second_signal(line, faulty, tmp_path):
    model = faulty(kind="none", delay=0.03)
    # As PATIENT, for an end that does not wait.
    entry = with_drain(tmp_path, "HURRIED_GRACE", 10.0)
    with Server(line, model.path, tmp_path / "log", args=model.args, entry=entry) as server:
        (stream,) = start(server.ready(), 1, max_tokens=LONG, seed=1)
        ask(server, signal.SIGINT)
        time.sleep(1)
        assert server.alive
        assert stream.thread.is_alive()
        again = ask(server, signal.SIGTERM)
        assert told(stream) == "shutting_down"
        assert server.wait_exit(30) == 0
        print(f"{line}: {time.monotonic() - again:.2f} s from the second signal to the end")
        assert time.monotonic() - again < SOON


@pytest.mark.guard("abrupt_stop")
def test_a_signal_that_comes_twice_at_once_is_one(faulty, tmp_path):
    """As from `timeout`, which signals its child and then the group.

    The server has noticed the first when the second comes.
    """
    model = faulty(kind="none", delay=0.02)
    # The test may be slow to send it.
    entry = with_drain(tmp_path, "ECHO_WINDOW", 60.0)
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, entry=entry) as server:
        (stream,) = start(server.ready(), 1, max_tokens=300)
        ask(server, signal.SIGTERM)
        assert wait_until(
            lambda: "a second signal ends it at once" in server.text(), 10, step=0.005
        )
        ask(server, signal.SIGTERM)
        model.hurry()
        assert stream.join().done
        assert server.wait_exit(30) == 0
        assert "SIGTERM; in flight: 1 finished, 0 cut short" in last_line(server)


@pytest.mark.guard("abrupt_stop")
def test_served_alone_without_a_drain(faulty, tmp_path):
    model = faulty(kind="none", delay=0.03)
    environ = {"MLX_SHIM_DRAIN": "0", **PATIENT}
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        (stream,) = start(server.ready(), 1, max_tokens=LONG, seed=1)
        asked = ask(server, signal.SIGTERM)
        assert told(stream) == "shutting_down"
        assert server.wait_exit(30) == 0
        print(f"{time.monotonic() - asked:.2f} s from SIGTERM to the end")
        assert time.monotonic() - asked < SOON, "25 s are the default"
        assert "SIGTERM; in flight: 0 finished, 1 cut short" in last_line(server)


# Notes which ends a program reaches: of the generation thread, of main, and of the interpreter.
TELLING = """
import atexit
from mlx_lm import server
def note(what):
    with open("ends", "a") as ends:
        ends.write(what + " ")
def generate(self, stock=server.ResponseGenerator._generate):
    stock(self)
    note("thread")
server.ResponseGenerator._generate = generate
atexit.register(note, "interpreter")
server.main()
note("main")
"""


def ends_of(folder, server, number):
    """(status, seconds from the signal, what a TELLING program has noted)."""
    asked = ask(server.ready(), number)
    status = server.wait_exit(30)
    seconds = time.monotonic() - asked
    ends = folder / "ends"
    noted = ends.read_text().split() if ends.exists() else []
    ends.unlink(missing_ok=True)
    return status, seconds, noted


@pytest.mark.guard("abrupt_stop")
def test_an_idle_server_ends_at_once_and_in_order(line, tiny, tmp_path):
    """The generation thread leaves its loop, and the interpreter's teardown does not run.

    On a busy machine the test tries again.
    """
    program = tmp_path / "program.py"
    program.write_text(TELLING)
    took = []
    for n in range(3):
        with Server(line, tiny, tmp_path / f"log{n}", entry=(str(program),)) as server:
            status, seconds, noted = ends_of(tmp_path, server, signal.SIGTERM)
        assert (status, noted) == (0, ["thread"])
        took.append(seconds)
        print(f"{line}: {seconds:.2f} s from SIGTERM to the end of an idle server")
        if seconds < HALF:
            break
    assert min(took) < HALF, took


@pytest.mark.control("abrupt_stop")
def test_control_stock_tears_the_interpreter_down(tiny, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TELLING)
    with Server(NEWEST, tiny, tmp_path / "log", entry=(str(program),), environ=OFF) as server:
        _, _, noted = ends_of(tmp_path, server, signal.SIGINT)
    if noted != ["thread", "main", "interpreter"]:
        raise Inconclusive(f"stock comes to {noted}")


@pytest.mark.guard("abrupt_stop")
def test_while_the_model_loads(line, faulty, tmp_path):
    model = faulty(kind="none", load_delay=90)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=PATIENT) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        waiting = Stream(server, {"prompt": "early", "max_tokens": 5})
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 1, 10)
        asked = ask(server, signal.SIGTERM)
        assert server.wait_exit(30) == 0
        assert time.monotonic() - asked < SOON
        assert told(waiting) == "shutting_down"
        assert waiting.status == 503


@pytest.mark.guard("abrupt_stop")
def test_an_engine_that_is_stuck(faulty, tmp_path):
    """No verdict has been reached when the signal comes: the drain bounds it."""
    model = faulty(kind="sleep", delay=0.02)
    environ = {"MLX_SHIM_DRAIN": "1s", **PATIENT}
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        (stream,) = start(server.ready(), 1, max_tokens=LONG)
        model.fire()
        asked = ask(server, signal.SIGTERM)
        assert told(stream) == "shutting_down"
        assert server.wait_exit(30) == 0
        assert time.monotonic() - asked < 15


@pytest.mark.guard("abrupt_stop")
def test_a_handler_of_the_program_is_the_programs(tiny, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import os, signal
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from mlx_lm.server import main
        main()
    """)
    )
    with Server(NEWEST, tiny, tmp_path / "log", entry=(str(program),)) as server:
        ask(server.ready(), signal.SIGINT)
        time.sleep(1)
        assert server.post({"prompt": "x", "max_tokens": 1})[0] == 200
        ask(server, signal.SIGTERM)
        assert server.wait_exit(30) == 5


@pytest.mark.guard("orphaned_process")
@pytest.mark.control("orphaned_process")
@pytest.mark.parametrize("guard", ["on", "off"])
def test_a_handler_of_the_program_that_exits(guard, tiny, tmp_path):
    """Its SystemExit(0) ends main alone, and stock never stops waiting for the generation thread.

    That thread was asked to end: it has not died.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "from mlx_lm.server import main\nmain()\n"
    )
    state = {"MLX_SHIM_CRASH_LOOP": "1", "MLX_SHIM_STATE_DIR": str(tmp_path / "state")}
    environ = {"MLX_SHIM": "0"} if guard == "off" else state
    with Server(NEWEST, tiny, tmp_path / "log", entry=(str(program),), environ=environ) as server:
        ask(server.ready(), signal.SIGTERM)
        if guard == "off":
            time.sleep(3)
            if not server.alive:
                raise Inconclusive(f"stock ended by itself with {server.process.returncode}")
            return
        assert server.wait_exit(30) == 0
        (file,) = (tmp_path / "state").glob("*.json")
        noted = json.loads(file.read_text())
        assert (noted["deaths"], noted["run"]) == ([], None)


@pytest.mark.guard("abrupt_stop")
def test_a_body_that_is_on_its_way_is_served(faulty, tmp_path):
    """Its headers came before the signal: once whole it is in flight, together with another."""
    model = faulty(kind="none", delay=0.02)
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args) as server:
        (stream,) = start(server.ready(), 1, max_tokens=400)
        head, rest = b'{"prompt": "x", ', b'"max_tokens": 1}'
        s = server.connect()
        s.putrequest("POST", "/v1/completions")
        s.putheader("Content-Length", str(len(head + rest)))
        s.endheaders(head)
        time.sleep(0.5)
        ask(server, signal.SIGTERM)
        threading.Timer(0.1, lambda: s.send(rest)).start()
        answer = s.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["choices"]
        model.hurry()
        assert stream.join().done
        assert server.wait_exit(30) == 0
