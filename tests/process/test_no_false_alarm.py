"""A slow or suspended server raises no alarm, and a mixed load leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import pytest

from kit.harness import LINES, NEWEST, Server, wait_until
from kit.streams import Stream

# The limits of the contract, 120 s and 600 s, with time running forty times as fast.
FAST = {"MLX_SHIM_DECODE_STALL": "3s", "MLX_SHIM_PREFILL_STALL": "15s"}
# Seconds, for the newest line; a quarter for the other. It is short in the suite, and long for a
# release.
SOAK = float(os.environ.get("MLX_LM_SHIM_SOAK", "60"))


def calm(server):
    assert server.alive, server.text()[-3000:]
    assert not any("stalled" in x for x in server.shim_lines())


@pytest.mark.guard("stall")
def test_one_token_in_three_quarters_of_the_limit(line, faulty, tmp_path):
    model = faulty(kind="none", delay=2.2)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=FAST) as server:
        stream = Stream(server, {"prompt": "x", "max_tokens": 6}) if server.ready() else None
        assert stream.join().done
        calm(server)


@pytest.mark.guard("stall")
def test_a_long_prefill_step_of_others_beside_one_in_decode(line, faulty, tmp_path):
    """Each step takes far longer than DECODE_STALL, and prefills a prompt."""
    model = faulty(kind="none", prefill_delay=5.0)
    args = (*model.args, "--prefill-step-size", "64")
    with Server(line, model.path, tmp_path / "log", args=args, environ=FAST) as server:
        decoding = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert decoding.first.wait(60)
        beside = Stream(server, {"prompt": "y" * 200, "max_tokens": 3})
        assert beside.join().done
        assert decoding.thread.is_alive()
        calm(server)


@pytest.mark.guard("stall")
def test_many_arrive_during_one_long_step(line, faulty, tmp_path):
    """Stock takes up each between two steps: a delivery to it, no step for the one in decode."""
    model = faulty(kind="none", prefill_delay=4.0)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=FAST) as server:
        decoding = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert decoding.first.wait(60)
        arriving = [
            Stream(server, {"prompt": f"{n} {'y' * 60}", "max_tokens": 2}) for n in range(24)
        ]
        for stream in arriving:
            stream.join()
        assert decoding.thread.is_alive()
        calm(server)


@pytest.mark.guard("stall")
def test_the_client_of_a_long_prompt_leaves(line, faulty, tmp_path):
    model = faulty(kind="none", prefill_delay=6.0)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=FAST) as server:
        decoding = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert decoding.first.wait(60)
        gone = server.send_and_leave({"prompt": "y" * 200, "max_tokens": 3})
        time.sleep(1)
        gone.close()
        time.sleep(8)
        assert decoding.thread.is_alive()
        calm(server)


@pytest.mark.guard("stall")
def test_many_queued_behind_one(line, faulty, tmp_path):
    """64 requests wait for one that is served alone for longer than any limit."""
    model = faulty(kind="none", delay=0.05)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=FAST) as server:
        alone = Stream(server.ready(), {"prompt": "x", "max_tokens": 400, "seed": 1})
        assert alone.first.wait(30)
        queued = []
        # The stock server listens with a backlog of five.
        for n in range(64):
            queued.append(Stream(server, {"prompt": f"{n} q", "max_tokens": 2}))
            time.sleep(0.02)
        assert alone.join().done
        for stream in queued:
            assert stream.join().done, (stream.status, stream.lines[-2:], stream.error)
        calm(server)


@pytest.mark.guard("stall")
def test_a_prompt_waiting_while_the_batch_is_full_of_others(line, faulty, tmp_path):
    model = faulty(kind="none", delay=0.1)
    args = (
        *model.args,
        "--decode-concurrency",
        "2",
        "--prompt-concurrency",
        "1",
        "--prefill-step-size",
        "8",
    )
    environ = {"MLX_SHIM_DECODE_STALL": "3s", "MLX_SHIM_PREFILL_STALL": "4s"}
    with Server(line, model.path, tmp_path / "log", args=args, environ=environ) as server:
        full = [Stream(server.ready(), {"prompt": "x", "max_tokens": 100}) for _ in range(2)]
        assert all(s.first.wait(30) for s in full)
        waiting = Stream(server, {"prompt": "w" * 60, "max_tokens": 3})
        assert waiting.join().done
        calm(server)


@pytest.mark.slow
@pytest.mark.guard("stall", "untruthful_health")
def test_a_model_that_loads_for_longer_than_any_limit(line, faulty, tmp_path):
    model = faulty(kind="none", load_delay=20.0)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=FAST) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        waiting = Stream(server, {"prompt": "x", "max_tokens": 3})
        status, body = server.get("/health")
        assert (status, body["status"]) == (503, "loading")
        assert server.get("/health/live")[0] == 200
        assert server.get("/health/ready")[0] == 503
        assert waiting.join().done, "a request waits for the model, as with stock"
        assert server.get("/health")[0] == server.get("/health/ready")[0] == 200
        calm(server)


@pytest.mark.guard("endless_wait")
def test_while_loading_reject(line, faulty, tmp_path):
    model = faulty(kind="none", load_delay=8.0)
    environ = {"MLX_SHIM_WHILE_LOADING": "reject"}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), 60)
        status, answer = server.post({"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        server.ready()


@pytest.mark.guard("stall")
def test_a_suspended_process(line, faulty, tmp_path):
    """SIGSTOP for longer than the limit, SIGCONT: a jump of the clock is not a stall."""
    model = faulty(kind="none", delay=0.05)
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=FAST) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert stream.first.wait(30)
        for _ in range(2):
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(6)
            os.kill(server.pid, signal.SIGCONT)
            time.sleep(2)
        assert stream.thread.is_alive()
        before = len(stream.lines)
        assert wait_until(lambda: len(stream.lines) > before, 10)
        calm(server)


@pytest.mark.slow
@pytest.mark.guard("stall")
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize(("line", "seconds"), [(NEWEST, SOAK), (LINES[0], SOAK / 4)])
def test_a_soak_leaves_nothing_behind(line, faulty, tmp_path, seconds):
    """Mixed streams, disconnects and bad requests: no alarm, and no thread or entry is left."""
    environ = {
        "MLX_SHIM_DECODE_STALL": "20s",
        "MLX_SHIM_PREFILL_STALL": "20s",
        "MLX_SHIM_SELF_CHECK": "1",
        "MLX_SHIM_BLOCKING_LOG": "1",
    }
    # The processor is not the subject.
    model = faulty(kind="none", delay=0.01)
    args = (*model.args, "--log-level", "ERROR")
    with Server(line, model.path, tmp_path / "log", environ=environ, args=args) as server:
        server.ready()
        # Then all that MLX and the tokenizer start once has started.
        load(server, 4)
        time.sleep(1.5)
        threads = thread_count(server)
        statuses = load(server, seconds)
        print(f"{line}: {statuses}")
        assert statuses.pop(200) > 20
        assert set(statuses) <= {400, -1}, "a bad request is 400; -1 is a client that left"
        assert statuses[400] and statuses[-1]
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, 20)
        assert wait_until(lambda: thread_count(server) <= threads, 20), (
            threads,
            thread_count(server),
        )
        calm(server)
        assert server.get("/health")[1]["status"] == "ok"


def load(server, seconds):
    """How often six clients got each status within `seconds`."""
    end = time.monotonic() + seconds
    statuses: dict[int, int] = {}
    clients = [
        threading.Thread(target=one_client, args=(server, end, n, statuses)) for n in range(6)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return statuses


def one_client(server, end, number, statuses):
    chance = random.Random(number)
    while time.monotonic() < end and server.alive:
        kind = chance.choice(["stream", "plain", "leave", "bad", "seed", "chat"])
        prompt = f"{chance.random()} " + "p" * chance.randrange(1, 300)
        status = -1
        if kind == "stream":
            status = Stream(server, {"prompt": prompt, "max_tokens": 30}).join().status
        elif kind in ("plain", "seed"):
            status = server.post(
                {"prompt": prompt, "max_tokens": 20} | ({"seed": 1} if kind == "seed" else {})
            )[0]
        elif kind == "chat":
            chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 10}
            status = server.post(chat, "/v1/chat/completions")[0]
        elif kind == "bad":
            status = server.post({"messages": [{"content": "no role"}]}, "/v1/chat/completions")[0]
        else:
            s = server.send_and_leave(
                {"prompt": prompt, "max_tokens": 3000, "stream": chance.random() < 0.5}
            )
            time.sleep(chance.random())
            s.close()
        statuses[status] = statuses.get(status, 0) + 1


def thread_count(server):
    import subprocess

    return int(
        subprocess.run(
            ["ps", "-o", "nlwp=", "-p", str(server.pid)], capture_output=True, text=True, check=True
        ).stdout
    )
