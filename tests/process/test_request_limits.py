"""The limits of a request: tokens, context, cache, body, number in flight, time to send it."""

from __future__ import annotations

import json
import socket

import pytest

from kit.harness import NEWEST, Inconclusive, Server, wait_until
from kit.streams import Stream
from kit.wire import head, raw, read_all
from shim.cli import tiny_model

TOKENS = {
    "MLX_SHIM_MAX_PROMPT_TOKENS": "100",
    "MLX_SHIM_MAX_TOKENS": "20",
    "MLX_SHIM_MAX_CONTEXT": "110",
}


def usage(answer):
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.guard("unlimited_tokens")
@pytest.mark.control("unlimited_tokens")
def test_tokens(line, faulty, tmp_path):
    """The tiny model's tokens are bytes. Served in the batch and, with a seed, alone."""
    model = faulty(kind="none")
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=TOKENS) as server:
        server.ready()
        for more in ({}, {"seed": 1}):
            status, answer = server.post({"prompt": "p" * 101 + str(more), "max_tokens": 1, **more})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            length = 101 + len(str(more))
            accepted = "accepted: 100 (MLX_SHIM_MAX_PROMPT_TOKENS)"
            assert answer["error"]["message"] == f"the prompt has {length} tokens; {accepted}"
            assert usage(server.post({"prompt": f"cap {more}", "max_tokens": 1000, **more})[1]) == (
                "length",
                20,
            )
            assert usage(server.post({"prompt": f"few {more}", "max_tokens": 3, **more})[1]) == (
                "length",
                3,
            )
            near = "n" * (100 - len(str(more))) + str(more)
            assert usage(server.post({"prompt": near, "max_tokens": 1000, **more})[1]) == (
                "length",
                10,
            )
        chat = [{"role": "user", "content": "c" * 200}]
        assert (
            server.post({"messages": chat}, "/v1/chat/completions")[1]["error"]["code"]
            == "context_length_exceeded"
        )
    with Server(
        line,
        model.path,
        tmp_path / "off",
        args=model.args,
        environ=TOKENS | {"MLX_SHIM_UNLIMITED_TOKENS": "0"},
    ) as server:
        answer = server.ready().post({"prompt": "p" * 200, "max_tokens": 30})
        if answer[0] != 200 or usage(answer[1]) != ("length", 30):
            raise Inconclusive(f"stock limits it by itself: {answer}")


@pytest.mark.guard("unlimited_tokens")
def test_a_prompt_that_fills_the_context_has_no_room(tiny, tmp_path):
    with Server(NEWEST, tiny, tmp_path / "log", environ={"MLX_SHIM_MAX_CONTEXT": "50"}) as server:
        status, answer = server.ready().post({"prompt": "p" * 50})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["message"].startswith("the prompt has 50 tokens; accepted: 49")
        assert usage(server.post({"prompt": "q" * 49, "max_tokens": 9})[1]) == ("length", 1)


NO_CACHES_OF_ITS_OWN = """
from mlx_lm.models import llama
from mlx_lm.models.llama import ModelArgs
class Model(llama.Model):
    @property
    def make_cache(self):
        raise AttributeError
"""


@pytest.mark.guard("unlimited_tokens")
@pytest.mark.parametrize("alone", [{}, {"seed": 1}], ids=["batch", "alone"])
def test_a_rotating_cache(line, alone, tmp_path):
    """With a window of 64 tokens the answer to a long text changes, and to a short one does not."""
    model = tiny_model.make(tmp_path / "model", model_file="model.py")
    (model / "model.py").write_text(NO_CACHES_OF_ITS_OWN)
    said = {}
    for size in ("0", "64"):
        log, environ = tmp_path / f"log{size}", {"MLX_SHIM_MAX_KV_SIZE": size}
        with Server(line, model, log, args=("--trust-remote-code",), environ=environ) as server:
            server.ready()
            bodies = (
                {"prompt": f"{n}" * n, "max_tokens": 8, "logprobs": True, **alone}
                for n in (20, 900)
            )
            said[size] = [
                server.post(body)[1]["choices"][0]["logprobs"]["content"] for body in bodies
            ]
    assert said["0"][0] == said["64"][0]
    assert said["0"][1] != said["64"][1]


@pytest.mark.guard("unlimited_tokens")
def test_where_a_rotating_cache_is_vain_that_is_said(tiny, tmp_path):
    with Server(NEWEST, tiny, tmp_path / "log", environ={"MLX_SHIM_MAX_KV_SIZE": "64"}) as server:
        server.ready()
        assert any(
            "MLX_SHIM_MAX_KV_SIZE does nothing for llama: it makes its own caches" in x
            for x in server.shim_lines()
        )


@pytest.mark.guard("unlimited_tokens")
def test_a_rotating_cache_is_not_for_draft_models(tmp_path):
    model = tiny_model.make(tmp_path / "model", model_file="model.py")
    (model / "model.py").write_text(NO_CACHES_OF_ITS_OWN)
    draft = tiny_model.make(tmp_path / "draft")
    args, environ = (
        ("--trust-remote-code", "--draft-model", str(draft)),
        {"MLX_SHIM_MAX_KV_SIZE": "64"},
    )
    with Server(NEWEST, model, tmp_path / "log", args=args, environ=environ) as server:
        assert usage(server.ready().post({"prompt": "d" * 100, "max_tokens": 30})[1]) == (
            "length",
            30,
        )
        assert any("does nothing with --kv-bits or a draft model" in x for x in server.shim_lines())


@pytest.mark.guard("unbounded_body")
def test_the_size_of_a_body(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", environ={"MLX_SHIM_MAX_BODY": "100K"}) as server:
        server.ready()
        large = json.dumps({"prompt": "x", "user": "u" * 5_000_000}).encode()
        status, answer = server.post(large)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "accepted: 102400 (MLX_SHIM_MAX_BODY)" in answer["error"]["message"]
        # Before a byte of it is read, or sent.
        assert raw(server, head(10**9)).startswith(b"HTTP/1.0 413 ")
        assert raw(server, head(10**30)).startswith(b"HTTP/1.0 413 ")
        assert server.post({"prompt": "x", "user": "u" * 90_000, "max_tokens": 1})[0] == 200
        for length in ("-1", "1_0", "+5", "5.0", "x", "", "٣"):
            assert raw(server, head(length)).startswith(b"HTTP/1.0 400 "), length
        assert raw(server, head(None)).startswith(b"HTTP/1.0 411 ")
        assert raw(server, head(None, "Transfer-Encoding: chunked")).startswith(b"HTTP/1.0 411 ")
        assert raw(server, head(5, "Content-Length: 6") + b"{}").startswith(b"HTTP/1.0 400 ")
        assert b"the body ended after 2 of the 50 bytes" in half_closed(server, head(50) + b"{}")


def half_closed(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(data)
        s.shutdown(socket.SHUT_WR)
        return read_all(s)


NO_CHECK = {"MLX_SHIM_UNBOUNDED_BODY": "0", "MLX_SHIM_BAD_REQUEST": "0"}


@pytest.mark.control("unbounded_body")
def test_stock_reads_a_body_of_any_size_and_waits_at_a_negative_length(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", environ=NO_CHECK) as server:
        server.ready()
        status, _ = server.post({"prompt": "x", "user": "u" * 70_000_000, "max_tokens": 1})
        with pytest.raises(TimeoutError):
            raw(server, head(-1) + b"{}", patience=3)
        if status != 200:
            raise Inconclusive(f"stock answers {status} to 70 MB")


@pytest.mark.guard("unlimited_queue")
@pytest.mark.control("unlimited_queue")
def test_requests_in_flight(line, faulty, tmp_path):
    model = faulty(kind="none", delay=0.03)
    environ = {"MLX_SHIM_MAX_INFLIGHT": "3"}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        server.ready()
        streams = [Stream(server, {"prompt": f"{n} s", "max_tokens": 400}) for n in range(3)]
        assert all(stream.first.wait(30) for stream in streams)
        connection = server.connect()
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": "more", "max_tokens": 1})
        )
        answer = connection.getresponse()
        told = json.loads(answer.read())["error"]
        assert (answer.status, told["code"], answer.headers["Retry-After"]) == (
            429,
            "too_many_requests",
            "1",
        )
        model.hurry()
        assert all(stream.join().done for stream in streams)
        assert wait_until(lambda: server.post({"prompt": "more", "max_tokens": 1})[0] == 200, 10)
        bad = [server.post({"prompt": ""})[0] for _ in range(5)] + [
            server.post(b"{")[0] for _ in range(5)
        ]
        assert bad == [400] * 10
        assert server.post({"prompt": "again", "max_tokens": 1})[0] == 200, (
            "a refused request gives its place back"
        )
    off = {**environ, "MLX_SHIM_UNLIMITED_QUEUE": "0"}
    with Server(NEWEST, model.path, tmp_path / "off", args=model.args, environ=off) as server:
        server.ready()
        model.take_its_time()
        streams = [Stream(server, {"prompt": f"{n} t", "max_tokens": 400}) for n in range(3)]
        assert all(stream.first.wait(30) for stream in streams)
        if server.post({"prompt": "more", "max_tokens": 1})[0] != 200:
            raise Inconclusive("stock turns it away by itself")


def test_an_unknown_path_is_told_whatever_its_body(line, tiny, tmp_path):
    """Stock hangs up on a body that it has not read, and the answer can be lost with it."""
    with Server(line, tiny, tmp_path / "log") as server:
        server.ready()
        for _ in range(5):
            assert server.post(b"x" * 5_000_000, path="/v1/embeddings") == (404, "Not Found")
