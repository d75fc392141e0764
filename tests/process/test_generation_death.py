"""The generation thread dies: the process must end with 70. Stock (the control) leaves a zombie."""

from __future__ import annotations

import time

import pytest

from kit.harness import LINES, Server, expect_zombie, wait_until

pytestmark = pytest.mark.usefixtures("killable")

KILLER_REQUESTS = {
    "empty prompt": {"prompt": ""},
    "top_k above the vocabulary": {"prompt": "x", "top_k": 10**6, "temperature": 0.5},
    "stop word that is no string": {"prompt": "x", "stop": [1]},
}
EXCEPTIONS = ["RuntimeError", "SystemExit", "MemoryError", "KeyboardInterrupt", "OwnBaseException"]
SWITCHES = [{"MLX_SHIM": "0"}, {"MLX_SHIM_GENERATION_DEATH": "0"}]


def one_of(switches, case, line):
    """The switches in turn, so that each line and each case sees every one of them."""
    n = [*KILLER_REQUESTS, *EXCEPTIONS].index(case) + LINES.index(line)
    return switches[n % len(switches)]


def verdict(server: Server) -> str:
    (line,) = [x for x in server.shim_lines() if "fatal:" in x]
    return line


@pytest.mark.guard("generation_death")
@pytest.mark.parametrize("killer", KILLER_REQUESTS)
def test_a_request_that_kills_the_thread_ends_the_process(line, tiny, tmp_path, killer):
    body = KILLER_REQUESTS[killer]
    with Server(line, tiny, tmp_path / "log") as server:
        server.ready()
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, 10)
        server.send_and_leave(body)
        killed = time.monotonic()
        assert server.wait_exit() == 70
        print(f"{line}, {killer}: {time.monotonic() - killed:.2f} s from the request to the exit")
        assert "the generation thread died: " in verdict(server)
        assert "1 in flight" in verdict(server)
        assert "Traceback (most recent call last)" in server.text()


@pytest.mark.control("generation_death")
@pytest.mark.parametrize("killer", KILLER_REQUESTS)
def test_control_stock_stays_as_a_zombie(line, tiny, tmp_path, killer):
    off = one_of(SWITCHES, killer, line)
    with Server(line, tiny, tmp_path / "log", environ=off) as server:
        server.ready().send_and_leave(KILLER_REQUESTS[killer])
        expect_zombie(server)


@pytest.mark.guard("generation_death")
@pytest.mark.control("generation_death")
@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_a_model_that_raises_ends_the_process(line, faulty, tmp_path, kind):
    model = faulty(kind=kind)
    with Server(line, model.path, tmp_path / "log", args=model.args) as server:
        server.ready()
        model.fire()
        server.send_and_leave({"prompt": "x"})
        killed = time.monotonic()
        assert server.wait_exit() == 70
        print(f"{line}, {kind}: {time.monotonic() - killed:.2f} s from the fault to the exit")
        assert f"{kind}: the model's forward failed" in verdict(server)
        assert "in misbehave" in server.text(), "the traceback names the frame"

    model.trigger.unlink()
    off = one_of(SWITCHES, kind, line)
    with Server(line, model.path, tmp_path / "control", args=model.args, environ=off) as server:
        server.ready()
        model.fire()
        server.send_and_leave({"prompt": "x"})
        expect_zombie(server)
