"""With a draft model the prompt cache changes no answer; in stock it does (control)."""

from __future__ import annotations

import pytest

from kit.harness import Inconclusive, Server

PROMPT = (
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals when"
)
COLD = ("--prompt-cache-size", "0")


def said(server):
    """The answers to a prompt, to it again, and to others with the same beginning.

    And how many tokens of each were cached.
    """
    prompts = (PROMPT, PROMPT, PROMPT[:-20] + "something else", PROMPT + "and", PROMPT)
    answers = [server.post({"prompt": prompt, "max_tokens": 12})[1] for prompt in prompts]
    texts = [answer["choices"][0]["text"] for answer in answers]
    return texts, sum(
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers
    )


@pytest.mark.guard("misfiled_cache")
@pytest.mark.control("misfiled_cache")
def test_the_cache_beside_a_draft_model_changes_no_answer(line, tiny, tmp_path):
    draft = ("--draft-model", str(tiny))
    with Server(
        line, tiny, tmp_path / "cold", args=draft + COLD, environ={"MLX_SHIM": "0"}
    ) as server:
        wanted, cached = said(server.ready())
        assert not cached
    with Server(line, tiny, tmp_path / "log", args=draft) as server:
        texts, cached = said(server.ready())
        assert texts == wanted
        assert cached > 3 * len(PROMPT) / 2, "the cache is used"
    with Server(
        line, tiny, tmp_path / "off", args=draft, environ={"MLX_SHIM_MISFILED_CACHE": "0"}
    ) as server:
        if said(server.ready())[0] == wanted:
            raise Inconclusive("stock's cache is in step with its keys")
