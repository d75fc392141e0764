"""A fault of one request ends that request; in stock (the control) it ends all generation."""

from __future__ import annotations

import json
import shutil

import pytest

from kit.harness import LINES, REPO, Inconclusive, Server, wait_until
from kit.streams import Stream
from shim.cli import tiny_model

OFF = {"MLX_SHIM_SHARED_FAULT": "0"}
# Tokens. Sequences of others stay shorter.
LONG = 500
# No token of the tokenizer has this id.
PADDED = {"300": 100}
DETOKENIZER = "the generation failed in the detokenizer: IndexError: list index out of range"


class PaddedModel:
    def __init__(self, folder):
        self.trigger = folder.with_suffix(".trigger")
        self.path = tiny_model.make(
            folder,
            vocab_size=320,
            eos_token_id=256,
            model_file="model.py",
            fault={"trigger": str(self.trigger)},
        )
        shutil.copy(REPO / "tests" / "kit" / "models" / "padded_model.py", folder / "model.py")
        spm_tokenizer(folder)
        self.args = ("--trust-remote-code",)

    def fire(self, where, kind):
        scratch = self.trigger.with_suffix(".new")
        scratch.write_text(json.dumps({"where": where, "kind": kind, "from": LONG}))
        scratch.rename(self.trigger)


def spm_tokenizer(folder):
    """A sentencepiece tokenizer of bytes alone: one token a byte, and the end of text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<0x00>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([tiny_model.EOS])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def padded(tmp_path):
    return PaddedModel(tmp_path / "padded")


def others(server, name):
    return [Stream(server, {"prompt": f"{n} {name}", "max_tokens": 400}) for n in range(3)]


def beside(server, expected, name, victim):
    """The result of `victim()` while others are served, whose answers do not change by it."""
    running = others(server, "beside the fault")
    assert all(stream.first.wait(30) for stream in running)
    given = victim()
    assert any(stream.thread.is_alive() for stream in running), f"{name}: nobody was beside it"
    assert [stream.join().text for stream in running] == expected, name
    assert all(stream.done for stream in running), name
    return given


@pytest.mark.slow
@pytest.mark.guard("shared_fault")
def test_the_fault_of_one_is_its_own(line, padded, tmp_path):
    with Server(line, padded.path, tmp_path / "log", args=padded.args) as server:
        server.ready()
        expected = [stream.join().text for stream in others(server, "beside the fault")]
        assert all(expected)
        before = server.get("/health")[1]["counters"]

        # The detokenizer, before the first byte.
        body = {"prompt": "padded", "max_tokens": 50, "logit_bias": PADDED}
        status, answer = beside(server, expected, "detokenizer", lambda: server.post(body))
        assert (status, answer["error"]["code"], answer["error"]["message"]) == (
            500,
            "generation_failed",
            DETOKENIZER,
        )
        stream = Stream(server, {**body, "prompt": "padded stream", "top_logprobs": 10}).join()
        assert (list(stream.events)[-1]["error"]["message"], stream.done) == (DETOKENIZER, False)
        assert server.text().count("IndexError('list index out of range')") == 2, (
            "said once a request"
        )
        assert "Traceback" in server.text(), "the original stays in the log"
        # Alone in the loop.
        status, answer = server.post({**body, "prompt": "padded alone", "seed": 1})
        assert (status, answer["error"]["message"]) == (500, DETOKENIZER)

        # Its top_logprobs, in the middle.
        padded.fire("convert", "KeyError")
        body = {"prompt": "top", "max_tokens": 50, "top_logprobs": 3}
        status, answer = beside(server, expected, "top_logprobs", lambda: server.post(body))
        told = "the generation failed in its top_logprobs: KeyError: 'convert failed'"
        assert (status, answer["error"]["message"]) == (500, told)
        status, answer = server.post({**body, "seed": 1})
        assert (status, answer["error"]["message"]) == (500, told)

        # The cache of a long prompt's first part; then at the end of an answer that is under way.
        padded.fire("extract", "ValueError")
        chat = {
            "messages": [
                {"role": "system", "content": "s" * LONG},
                {"role": "user", "content": "u"},
            ]
        }
        status, answer = beside(
            server, expected, "segment", lambda: server.post(chat, "/v1/chat/completions")
        )
        assert (status, answer["error"]["code"]) == (500, "generation_failed")
        assert (
            "in the extraction of its cache: ValueError: extract failed"
            in answer["error"]["message"]
        )
        body = {"prompt": "e" * LONG, "max_tokens": 20}
        stream = beside(server, expected, "end", lambda: Stream(server, body).join())
        assert (stream.status, stream.done) == (200, False)
        *tokens, error = stream.events
        assert tokens
        assert "extract failed" in error["error"]["message"]

        # A cache that cannot be counted is not kept; its request has its answer.
        padded.fire("nbytes", "TypeError")
        body = {"prompt": "n" * (LONG + 9), "max_tokens": 20}
        status, answer = beside(server, expected, "nbytes", lambda: server.post(body))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
        assert server.post({**body, "seed": 1})[0] == 200
        # After the prompt, at the end, and alone in the loop: each line comes after the answer.
        assert wait_until(
            lambda: server.text().count("is not kept: TypeError('nbytes failed')") == 3, 10
        )
        padded.trigger.unlink()
        again = server.post(body)[1]
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        status, health = server.get("/health")
        assert (status, health["status"]) == (200, "ok")
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 0, 10)
        after = server.get("/health")[1]["counters"]
        grown = {name: after[name] - before[name] for name in after}
        assert grown == {
            "requests": 25,
            "finished": 18,
            "failed": 7,
            "abandoned": 0,
            "timed_out": 0,
        }

        dies_of_what_mlx_raises(server, padded)


def dies_of_what_mlx_raises(server, padded):
    """A RuntimeError in the same place does not belong to one request."""
    padded.fire("extract", "RuntimeError")
    server.send_and_leave({"prompt": "r" * LONG, "max_tokens": 5})
    assert server.wait_exit(30) == 70


CONTROLS = [
    *((line, None, {"prompt": "x", "logit_bias": PADDED}) for line in LINES),
    (LINES[0], "extract", {"prompt": "e" * LONG, "max_tokens": 2}),
    (LINES[1], "nbytes", {"prompt": "n" * LONG, "max_tokens": 2}),
]


@pytest.mark.control("shared_fault")
@pytest.mark.parametrize(("line", "where", "body"), CONTROLS)
def test_control_stock_dies_of_it(line, padded, tmp_path, where, body):
    with Server(line, padded.path, tmp_path / "log", args=padded.args, environ=OFF) as server:
        server.ready()
        if where is not None:
            padded.fire(where, "ValueError")
        server.send_and_leave(body)
        if not wait_until(lambda: not server.alive, 20) or server.process.returncode != 70:
            raise Inconclusive(f"the fault killed nobody; the log:\n{server.text()[-2000:]}")
