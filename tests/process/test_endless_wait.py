"""No request waits without end: neither for a dead engine, nor beyond its own time limit."""

from __future__ import annotations

import pytest

from kit.harness import KILLER, Inconclusive, Server, wait_until
from kit.streams import Stream, error_of


@pytest.mark.guard("endless_wait")
@pytest.mark.parametrize("seed", [{}, {"seed": 1}], ids=["batched", "sequential"])
def test_a_request_timeout_ends_that_request_alone(line, faulty, tmp_path, seed):
    model = faulty(kind="none", delay=0.02)
    environ = {"MLX_SHIM_REQUEST_TIMEOUT": "6s"}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        server.ready()
        stream = Stream(server, {"prompt": "x", "max_tokens": 100_000, **seed})
        assert stream.first.wait(30)
        # Served alone, it waits.
        status, answer = server.post({"prompt": "x", "max_tokens": 100_000, **seed})
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        assert stream.join().status == 200
        assert not stream.done
        assert error_of(stream)["code"] == "request_timeout"
        assert server.post({"prompt": "x", "max_tokens": 10})[0] == 200
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, 5)


@pytest.mark.guard("endless_wait")
@pytest.mark.usefixtures("killable")
def test_a_waiter_on_a_dead_engine_is_told(line, tiny, tmp_path):
    """With the exit turned off the engine is dead and the process lives: still no request hangs."""
    environ = {"MLX_SHIM_GENERATION_DEATH": "0"}
    with Server(line, tiny, tmp_path / "log", environ=environ) as server:
        server.ready()
        dying = Stream(server, KILLER).join(20)
        assert error_of(dying)["code"] == "engine_dead"
        assert not dying.done
        status, answer = server.post({"prompt": "x"}, timeout=10)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        status, answer = server.post({"prompt": "x", "model": "no/such-model"}, timeout=10)
        assert (status, answer["error"]["code"]) == (503, "engine_dead"), "before it is looked for"
        assert server.get("/health")[1]["status"] == "dead"
        assert server.get("/health/live")[0] == server.get("/v1/models")[0] == 503


@pytest.mark.control("endless_wait")
def test_control_a_waiter_without_the_guard(line, faulty, tmp_path):
    """With endless_wait off nothing ends a request.

    Its time limit does not, and on 0.31.3 the death of the engine does not either.
    """
    model = faulty(kind="RuntimeError", delay=0.05)
    off = {
        "MLX_SHIM_ENDLESS_WAIT": "0",
        "MLX_SHIM_GENERATION_DEATH": "0",
        "MLX_SHIM_REQUEST_TIMEOUT": "1s",
    }
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=off) as server:
        waiting = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert waiting.first.wait(30)
        waiting.thread.join(4)
        if not waiting.thread.is_alive():
            raise Inconclusive("the request was ended at its time without the guard")
        model.fire()
        if line == "0.31.3":
            waiting.thread.join(4)
            if not waiting.thread.is_alive():
                raise Inconclusive("the waiter was told of the death without the guard")
