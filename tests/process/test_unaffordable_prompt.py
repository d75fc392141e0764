"""A prompt that cannot fit below MLX_SHIM_MEMORY_HARD is refused before it is started.

For that the guard must know how much a token takes.
"""

from __future__ import annotations

import re
import time

import pytest

from kit.harness import Inconclusive, Server, wait_until
from kit.models import big_model
from kit.scales import MIB, Scales, text_of, warm
from kit.streams import Stream

# 1,280 tokens of 32 KiB.
ROOM = 40 * MIB
TOO_LONG = {"prompt": "z" * 2000, "max_tokens": 1, "temperature": 0}
FITS = {"prompt": "y" * 500, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return big_model.big_kv_model(tmp_path_factory.mktemp("models") / "big")


def begun(server):
    """The prompts of 2000 tokens and more that the log shows as done."""
    return re.findall(r"progress: (2\d{3})/\1$", server.text(), re.MULTILINE)


def refusals(server):
    """The answers to the prompt that is too long: in a batch, served alone, and in a chat."""
    # Each has a prompt of its own.
    chat = {
        "messages": [{"role": "user", "content": "u" * 2000}],
        "max_tokens": 1,
    }
    return {
        "batch": server.post(TOO_LONG),
        "alone": server.post(TOO_LONG | {"prompt": "v" * 2000, "seed": 1}),
        "chat": server.post(chat, "/v1/chat/completions"),
    }


@pytest.mark.guard("unaffordable_prompt")
@pytest.mark.control("unaffordable_prompt")
def test_400_with_what_would_fit_and_503_beside_others(line, big, tmp_path):
    with Server(line, big, tmp_path / "stock", environ={"MLX_SHIM": "0"}) as server:
        base = warm(server)
        alone = text_of(server.post(FITS))
        with Scales(server) as stock:
            answers = refusals(server)
        if {status for status, _ in answers.values()} != {200} or stock.most < base + ROOM:
            raise Inconclusive(f"stock answered {answers} and held {stock.most - base} more")
        assert len(begun(server)) == 3, "each is begun"
    # Soft and its effects belong to another guard.
    environ = {"MLX_SHIM_MEMORY_HARD": str(base + ROOM), "MLX_SHIM_EXHAUSTED_MEMORY": "0"}
    with Server(line, big, tmp_path / "log", environ=environ) as server:
        assert text_of(server.ready().post(FITS)) == alone, "nothing is known before the first"
        # Stock is still putting the last answer into the prompt cache.
        time.sleep(0.5)
        with Scales(server) as ours:
            answers = refusals(server)
            time.sleep(0.5)
        fits = set()
        for name, (status, told) in answers.items():
            message = told["error"]["message"]
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded"), name
            tokens, fit = map(
                int, re.search(r"has (\d+) tokens, .*accepted: (\d+)", message).groups()
            )
            assert 2000 <= tokens < 2000 + 20 * (name == "chat") + 1, message
            fits.add(fit)
        (fit,) = fits
        assert 500 < fit < 2000
        assert begun(server) == [], "none of them is begun"
        assert ours.most < ours.before + 24 * MIB, (
            "nor is anything taken for them, of the 62 MiB and more that it would be"
        )
        status, told = server.post({"prompt": "t" * (fit + 1), "max_tokens": 1})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded"), (
            "what is accepted is the limit"
        )
        assert text_of(server.post(FITS)) == alone
        busy = Stream(server, {"prompt": "x" * 700, "max_tokens": 400, "temperature": 0})
        assert wait_until(
            lambda: re.search(r"progress: 699/(699|700)", server.text()), 60, 0.005
        ), "it decodes"
        status, told = server.post({"prompt": "w" * (fit - 100), "max_tokens": 1})
        assert (status, told["error"]["code"]) == (503, "memory_pressure")
        assert busy.join().done, "whoever was there first goes on"
        assert wait_until(
            lambda: server.post({"prompt": "w" * (fit - 100), "max_tokens": 1})[0] == 200, 20
        ), "it fits without the others"
