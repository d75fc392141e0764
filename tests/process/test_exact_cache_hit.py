"""A prompt that is an entry of the prompt cache is answered as by a server without a prompt cache.

In stock it is the end (control). There are three kinds of caches: those that can be trimmed
(llama), those that cannot (a hybrid model), and those that can until their window is full (sliding
window). The model may only say letters, so that its text is its tokens.
"""

from __future__ import annotations

import http.client

import pytest

from kit.harness import ANSWER, NEWEST, Inconclusive, Server
from kit.models import hybrid_model
from kit.streams import Stream
from shim.cli import tiny_model
from shim.engine import fatal

WINDOW = 48
KINDS = ("llama", "hybrid", "sliding")
# Tokens are sorted by character.
LETTERS = {str(ord(letter) - ord("!")): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}
SPACE = {"220": 100}
SHORT, LONG = (
    "Once upon a time, ",
    "It was a dark and stormy night; the rain fell in torrents, except at occasional ",
)


def make_model(kind, line, folder):
    if kind == "hybrid":
        return hybrid_model.make(line, folder, "qwen3_next")
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    return tiny_model.make(folder, **(layers if kind == "sliding" else {}))


class Client:
    """Asks, and keeps of each answer: its text, its tokens, why it ended, the prompt's tokens."""

    def __init__(self, server, **body):
        self.server, self.body = server, body
        self.answers, self.cached = [], []

    def ask(self, prompt, n=6, bias=LETTERS):
        body = {
            "prompt": prompt,
            "max_tokens": n,
            "logit_bias": bias,
            "logprobs": True,
            **self.body,
        }
        status, answer = self.server.post(body)
        self.keep(prompt, status, answer)
        return answer["choices"][0]["text"]

    def chat(self, question):
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 6,
            "logit_bias": LETTERS,
            **self.body,
        }
        status, answer = self.server.post({**body, "logprobs": True}, "/v1/chat/completions")
        self.keep(question, status, answer)

    def keep(self, prompt, status, answer):
        assert status == 200, (prompt, answer)
        choice, usage = answer["choices"][0], answer["usage"]
        self.cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        ids = [token["id"] for token in choice["logprobs"]["content"]]
        self.answers.append((prompt, said, ids, choice["finish_reason"], usage["prompt_tokens"]))

    def stream(self, prompt):
        stream = Stream(
            self.server, {"prompt": prompt, "max_tokens": 6, "logit_bias": LETTERS, **self.body}
        ).join()
        assert stream.done, stream.lines
        self.answers.append((prompt, stream.text))


def conversation(client, name):
    """Every way to meet an entry.

    The prompt with its answer, one token less than that, the prompt itself, and one token less.
    """
    for start, n in ((name + SHORT, 1), (name + LONG, 12)):
        said = client.ask(start, n)
        assert len(said) == n
        client.ask(start + said)
        client.stream(start + said)
        client.ask(start + said[:-1])
        client.ask(start)
        client.ask(start[:-1])
    # The prompt of a chat as the template makes it, to the last space. The model says that space,
    # so the prompt with it becomes an entry.
    client.ask(f"user: {name}?\nassistant:", 1, SPACE)
    assert client.answers[-1][2] == [int(token) for token in SPACE]
    client.chat(f"{name}?")
    client.chat(f"{name}?")


def everything(server, models):
    """The same conversation with each kind of cache, in the batch and alone.

    And an exact hit with a draft model.
    """
    answers, cached = [], {}
    for kind, model in models.items():
        for way, more in (("batch", {}), ("alone", {"seed": 7})):
            client = Client(server, model=str(model), **more)
            conversation(client, f"{kind} {way}: ")
            answers += client.answers
            cached[kind, way] = client.cached
    draft = Client(server, model=str(models["llama"]), draft_model=str(models["llama"]))
    draft.ask(LONG + draft.ask(LONG))
    return answers + draft.answers, cached


@pytest.mark.guard("exact_cache_hit")
def test_the_answers_are_a_cold_servers(line, tmp_path):
    models = {kind: make_model(kind, line, tmp_path / kind) for kind in KINDS}
    with Server(line, models["llama"], tmp_path / "log") as server:
        warm, cached = everything(server.ready(), models)
        assert server.get("/health")[1]["guards"]["exact_cache_hit"] == "active"
    cold_cache = ("--prompt-cache-size", "0")
    with Server(
        line, models["llama"], tmp_path / "cold", args=cold_cache, environ={"MLX_SHIM": "0"}
    ) as server:
        cold, nothing = everything(server.ready(), models)
    assert not any(any(counts) for counts in nothing.values()), "it has no prompt cache"
    for ours, theirs in zip(warm, cold, strict=True):
        assert ours == theirs
    print(cached)
    for way in ("batch", "alone"):
        assert all(count > len(SHORT) for count in cached["llama", way][1:4]), "the cache is used"
    assert any(cached["hybrid", "batch"])
    assert any(cached["sliding", "alone"])


@pytest.mark.control("exact_cache_hit")
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_control_stock_dies(line, tmp_path, kind):
    if kind == "hybrid" and line != NEWEST:
        # One line is enough.
        return
    model = make_model(kind, line, tmp_path / kind)
    with Server(line, model, tmp_path / "log", environ={"MLX_SHIM_EXACT_CACHE_HIT": "0"}) as server:
        client = Client(server.ready())
        said = client.ask(SHORT, 5)
        try:
            client.ask(SHORT + said if kind == "llama" else SHORT[:-1])
        except (AssertionError, OSError, http.client.HTTPException):
            pass
        if server.wait_exit(ANSWER) != fatal.EX_SOFTWARE:
            raise Inconclusive(f"stock survives it: {server.text()[-2000:]}")
