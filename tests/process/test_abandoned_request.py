"""A client goes away, at any stage: its generation stops within two seconds. Stock computes on."""

from __future__ import annotations

import random
import time

import pytest

from kit.harness import Inconclusive, Server, wait_until
from kit.streams import Stream

LONG = {"prompt": "x", "max_tokens": 100_000}
OFF = {"MLX_SHIM_ABANDONED_REQUEST": "0"}
# Seconds. The docs promise two; this is for a busy machine. The tests print the time taken.
BOUND = 10.0


def forwards(model):
    """How often the model was asked so far: the work that a GPU would have done."""
    return model.counted.stat().st_size if model.counted.exists() else 0


def idle(model):
    before = forwards(model)
    time.sleep(0.6)
    return forwards(model) == before


@pytest.fixture
def slow(faulty):
    return faulty(kind="none", delay=0.03, count=True)


def leave_at(stage, server):
    """Bring a request to a stage and return the socket of its client."""
    if stage in ("decode, not streamed", "decode, streamed"):
        s = server.send_and_leave({**LONG, "stream": stage.endswith(", streamed")})
    elif stage == "alone in the loop":
        s = server.send_and_leave({**LONG, "seed": 1})
    else:
        # A prompt of many prefill steps, alone in the loop: stock notices nothing meanwhile.
        s = server.send_and_leave(
            {"prompt": "y" * 4000, "max_tokens": 100_000, "seed": 1, "stream": "streamed" in stage}
        )
    time.sleep(1.5)
    return s


STAGES = [
    "decode, not streamed",
    "decode, streamed",
    "alone in the loop",
    "prefill, alone",
    "prefill, alone, streamed",
]


@pytest.mark.guard("abandoned_request")
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves(line, slow, tmp_path, stage):
    args = (*slow.args, "--prefill-step-size", "8")
    with Server(line, slow.path, tmp_path / "log", args=args) as server:
        gone = leave_at(stage, server.ready())
        assert not idle(slow), "it was at work"
        gone.close()
        left = time.monotonic()
        assert wait_until(lambda: idle(slow), BOUND), server.text()[-2000:]
        print(f"{line}, {stage}: {time.monotonic() - left - 0.6:.1f} s until the engine was idle")
        assert server.post({"prompt": "z", "max_tokens": 2})[0] == 200
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, BOUND)
        assert "Traceback" not in server.text(), "a client that left is no error"


@pytest.mark.guard("abandoned_request")
def test_a_client_that_sent_more_than_its_request(line, slow, tmp_path):
    """The end of its connection stands behind those bytes."""
    with Server(line, slow.path, tmp_path / "log", args=slow.args) as server:
        gone = server.ready().send_and_leave(LONG)
        time.sleep(0.5)
        gone.sendall(b"\r\nGET /health HTTP/1.1\r\n\r\n")
        time.sleep(1)
        assert not idle(slow)
        gone.close()
        assert wait_until(lambda: idle(slow), BOUND)


@pytest.mark.control("abandoned_request")
@pytest.mark.parametrize("stage", ["decode, not streamed", "prefill, alone"])
def test_control_stock_computes_on(line, slow, tmp_path, stage):
    args = (*slow.args, "--prefill-step-size", "8")
    for environ in (OFF, {"MLX_SHIM": "0"}):
        with Server(line, slow.path, tmp_path / "log", args=args, environ=environ) as server:
            leave_at(stage, server.ready()).close()
            time.sleep(4)
            if idle(slow):
                raise Inconclusive("the generation ended by itself")


@pytest.mark.guard("abandoned_request")
@pytest.mark.parametrize("streamed", [False, True])
def test_clients_that_leave_while_queued(line, slow, tmp_path, streamed):
    """Behind a request that is served alone; none of them is ever computed."""
    with Server(line, slow.path, tmp_path / "log", args=slow.args) as server:
        blocker = server.ready().send_and_leave({**LONG, "seed": 1})
        time.sleep(0.5)
        queued = [
            server.send_and_leave({**LONG, "prompt": f"{n} x", "stream": streamed})
            for n in range(20)
        ]
        time.sleep(0.5)
        for s in queued:
            s.close()
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 1, BOUND)
        blocker.close()
        assert wait_until(lambda: idle(slow), BOUND)
        done = forwards(slow)
        assert server.post({"prompt": "z", "max_tokens": 2})[0] == 200
        assert forwards(slow) - done < 20, "the twenty were not computed in between"
        assert server.get("/health")[1]["counters"]["abandoned"] == 21


@pytest.mark.guard("abandoned_request")
def test_clients_that_leave_while_waiting_in_the_batch(line, slow, tmp_path):
    """With the batch full they wait inside BatchGenerator; they leave it without a prefill."""
    args = (*slow.args, "--decode-concurrency", "2", "--prompt-concurrency", "1")
    with Server(line, slow.path, tmp_path / "log", args=args) as server:
        kept = [Stream(server.ready(), {"prompt": "x", "max_tokens": 500}) for _ in range(2)]
        assert all(s.first.wait(30) for s in kept)
        waiting = [server.send_and_leave({**LONG, "prompt": f"{n} {'w' * 100}"}) for n in range(10)]
        time.sleep(1)
        for s in waiting:
            s.close()
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 2, BOUND)
        slow.hurry()
        for stream in kept:
            assert stream.join().done
        assert wait_until(lambda: idle(slow), BOUND)
        assert server.post({"prompt": "z", "max_tokens": 2})[0] == 200


@pytest.mark.guard("abandoned_request")
def test_two_hundred_clients_that_leave_at_random(line, slow, tmp_path):
    chance = random.Random(1)
    with Server(line, slow.path, tmp_path / "log", args=slow.args) as server:
        server.ready()
        clients = []
        for n in range(200):
            body = {
                "prompt": f"{n} " + "x" * chance.randrange(50),
                "max_tokens": 5000,
                "stream": n % 2 == 0,
            }
            clients.append(server.send_and_leave(body))
            if n % 3 == 0:
                time.sleep(0.005)
            if chance.random() < 0.3:
                clients.pop(chance.randrange(len(clients))).close()
        while clients:
            clients.pop(chance.randrange(len(clients))).close()
            time.sleep(0.002)
        left = time.monotonic()
        assert wait_until(lambda: idle(slow), 3 * BOUND)
        print(
            f"{line}: {time.monotonic() - left - 0.6:.1f} s "
            "from the last of 200 clients to an idle engine"
        )
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, BOUND)
        assert server.post({"prompt": "z", "max_tokens": 2})[0] == 200
        assert server.alive
