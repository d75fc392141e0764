"""A hybrid model in the stock server: a conversation with cache hits has the answers of stock."""

from __future__ import annotations

import pytest

from kit.harness import START, Inconclusive, Server, wait_until
from kit.models import hybrid_model

OFF = {
    "MLX_SHIM_LEAKING_ADVANCE": "0",
    "MLX_SHIM_LEAKING_OFFSET": "0",
    "MLX_SHIM_PINNED_BATCH": "0",
}
TURNS = 6


@pytest.fixture
def model(line, tmp_path):
    return hybrid_model.make(line, tmp_path / "model", "qwen3_next")


def conversation(server, seed=None):
    """The answer of each turn, and how many of its prompt's tokens came from the cache."""
    answers, prompt = [], "Once upon a time there was a long prompt. "
    for turn in range(TURNS):
        body = {"prompt": prompt, "max_tokens": 20, "logprobs": True} | (
            {"seed": seed} if seed else {}
        )
        status, answer = server.post(body)
        assert status == 200
        choice = answer["choices"][0]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        answers.append([choice["text"], choice["logprobs"]["content"], cached])
        # The answer is noise, and not all of it is text. So the next turn goes on from the prompt.
        prompt += f"And turn {turn} of it went on. "
    return answers


@pytest.mark.guard("leaking_advance", "leaking_offset", "pinned_batch")
@pytest.mark.parametrize("seed", [None, 7], ids=["batched", "alone"])
def test_turns_with_cache_hits_answer_as_stock(line, model, tmp_path, seed):
    results = []
    for environ in ({}, OFF, {"MLX_SHIM": "0"}):
        with Server(line, model, tmp_path / f"log{len(results)}", environ=environ) as server:
            results.append(conversation(server.ready(), seed))
    assert results[0] == results[1] == results[2], "texts, logprobs and cache hits"
    chat = chat_turns(line, model, tmp_path)
    if not any(cached for cached in chat):
        raise Inconclusive("no turn hit the prompt cache")


def chat_turns(line, model, tmp_path):
    """Cached tokens of each turn of a chat.

    Its prefix up to the user's last message is an entry of the cache.
    """
    cached, messages = [], [{"role": "system", "content": "Be brief. " * 10}]
    with Server(line, model, tmp_path / "chat") as server:
        server.ready()
        for turn in range(4):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            status, answer = server.post(
                {"messages": messages, "max_tokens": 5}, "/v1/chat/completions"
            )
            assert status == 200
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append({"role": "assistant", "content": "yes"})
    return cached


def test_speculative_decoding_does_not_use_that_cache(line, model, tmp_path):
    """It needs caches that can be trimmed, and refuses others, so there is nothing to guard."""
    with Server(line, model, tmp_path / "log", args=("--draft-model", str(model))) as server:
        assert wait_until(lambda: "Starting httpd" in server.text(), START)
        status, answer = server.post({"prompt": "some text", "max_tokens": 5})
        assert status == 500
        assert "trimmable" in answer["error"]["message"]
