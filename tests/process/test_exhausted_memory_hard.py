"""One long history, and models in turn: stock crosses MLX_SHIM_MEMORY_HARD, the guard does not.

psutil counts from outside what the process holds. With hard alone, soft is the same figure.
"""

from __future__ import annotations

import json
import re

import pytest

from kit.harness import NEWEST, Inconclusive, Server
from kit.models.big_model import STEP, big_kv_model, bytes_per_token, vocabulary_bytes
from kit.scales import MIB, Scales, patient, text_of, warm
from kit.streams import Stream

TOKEN = bytes_per_token(4096)
CHAT = "/v1/chat/completions"
# Of a history: 3072 tokens of 32 KiB.
ROOM = 96 * MIB
TURNS = 4
# 3500 tokens.
DOCUMENT = "".join(f"{n:04} " for n in range(700))


def fits(answer):
    """How many tokens would fit, as a refused client is told."""
    return int(re.search(r"accepted: (\d+)", answer[1]["error"]["message"])[1])


def converse(server):
    """The answers in one conversation: a few turns, and then a document.

    Each turn repeats all that was said before and adds to it. The answer to the last is whole, with
    its status.
    """
    messages, said = [], []
    for n in range(TURNS + 1):
        content = DOCUMENT if n == TURNS else f"{n}: " + "and what then? " * 6
        messages.append({"role": "user", "content": content})
        last = server.post({"messages": messages, "max_tokens": 8, "temperature": 0}, CHAT)
        if n < TURNS:
            said.append(last[1]["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": said[-1]})
    return said, last


@pytest.mark.guard("unaffordable_prompt")
@pytest.mark.control("unaffordable_prompt")
def test_a_history_that_grows_until_it_does_not_fit(line, tmp_path):
    """It is served to the last prompt that fits, and nothing of the next one is begun.

    The estimate is for the cache of a prompt. While that joins a batch, stock holds it several
    times, which is not counted (docs/memory.md): one that takes more than a third of the room may
    cross hard for a moment. Here none of those that are served does.
    """
    small = {"prompt": "small", "max_tokens": 8, "temperature": 0}
    model = big_kv_model(tmp_path / "model")
    with Server(line, model, tmp_path / "stock", environ={"MLX_SHIM": "0"}) as server:
        hard = warm(server) + ROOM
        alone = text_of(server.post(small))
        with Scales(server) as stock:
            expected, last = converse(server)
        assert last[0] == 200, last
        if stock.most < hard:
            raise Inconclusive(f"stock held {stock.most / MIB:.0f} MiB, hard is {hard / MIB:.0f}")
    assert len(set(expected)) > 2, "a text that is always the same tells nothing"
    with Server(
        line, model, tmp_path / "log", environ={"MLX_SHIM_MEMORY_HARD": str(hard)}
    ) as server:
        warm(server)
        with Scales(server) as ours:
            said, refused = converse(server)
            assert text_of(server.post(small)) == alone, "who asks next is served"
        assert ours.most < hard, server.text()
        assert "memory: " not in server.text(), "nothing was short, and the limit was not left out"
    assert said == expected
    assert (refused[0], refused[1]["error"]["code"]) == (400, "context_length_exceeded"), refused
    tokens = last[1]["usage"]["prompt_tokens"]
    assert f"has {tokens} tokens" in refused[1]["error"]["message"]
    assert ROOM - STEP * TOKEN <= fits(refused) * TOKEN < tokens * TOKEN
    print(
        f"{line}: stock {stock.most / MIB:.0f} MiB, ours {ours.most / MIB:.0f}, "
        f"hard {hard / MIB:.0f}"
    )


@pytest.mark.guard("exhausted_memory")
def test_one_that_is_above_hard_by_itself(tmp_path):
    """It was begun, since nothing told how much it would take. It is ended.

    It is not told to try again, since it would take as much again.
    """
    model = big_kv_model(tmp_path / "model")
    small = {"prompt": "small", "max_tokens": 8, "temperature": 0}
    with Server(NEWEST, model, tmp_path / "base", environ={"MLX_SHIM": "0"}) as server:
        hard = warm(server) + ROOM // 2
        alone = text_of(server.post(small))
    environ = {"MLX_SHIM_MEMORY_HARD": str(hard), "MLX_SHIM_UNAFFORDABLE_PROMPT": "0"}
    with Server(NEWEST, model, tmp_path / "log", environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": DOCUMENT, "max_tokens": 4000}).join()
        assert not stream.done
        told = json.loads(stream.lines[-1]) if stream.status != 200 else list(stream.events)[-1]
        assert told["error"]["code"] == "context_length_exceeded", told
        assert text_of(patient(server, small)) == alone


# 77 MB of weights.
VOCABULARY = 300_000
# Above the first model: half of the memory that the second takes.
SWITCH_ROOM = 40 * MIB
# 81 MiB by the first model, 5 by the second.
LONG = "long " * 520
# The memory that a step takes besides the caches is not the subject here.
STEPS = ("--prefill-step-size", "256")


@pytest.mark.guard("unaffordable_prompt")
def test_models_in_turn(line, tmp_path):
    """One goes before the other is loaded, and each has its size of a token: 32 KiB, then 2."""
    assert vocabulary_bytes(VOCABULARY) > 1.5 * SWITCH_ROOM
    first, second = (
        big_kv_model(tmp_path / name, head_dim=head_dim, vocabulary=VOCABULARY)
        for name, head_dim in (("first", 4096), ("second", 256))
    )

    def ask(server, model, prompt):
        return patient(
            server, {"prompt": prompt, "max_tokens": 8, "temperature": 0, "model": str(model)}
        )

    def visit(server):
        return [
            text_of(ask(server, *x)) for x in ((second, "small"), (second, LONG), (first, "small"))
        ]

    with Server(line, first, tmp_path / "stock", args=STEPS, environ={"MLX_SHIM": "0"}) as server:
        hard = warm(server) + SWITCH_ROOM
        with Scales(server) as stock:
            expected = visit(server)
        if stock.most < hard:
            raise Inconclusive(f"stock held {stock.most / MIB:.0f} MiB, hard is {hard / MIB:.0f}")
    assert len(set(expected)) == 3
    with Server(
        line, first, tmp_path / "log", args=STEPS, environ={"MLX_SHIM_MEMORY_HARD": str(hard)}
    ) as server:
        warm(server)
        with Scales(server) as ours:
            refused = ask(server, first, LONG)
            assert visit(server) == expected, "the second has room for what the first had none for"
            again = ask(server, first, LONG)
            assert text_of(ask(server, second, "small")) == expected[0]
            longer = ask(server, second, LONG * 16)
        assert ours.most < hard, server.text()
        assert "memory: " not in server.text(), "nothing was short, and no limit was left out"
    for status, answer in (refused, again, longer):
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
    assert fits(refused) == fits(again)
    assert fits(refused) < len(LONG) < 10 * fits(refused) < fits(longer) < 16 * len(LONG), (
        "counted by its own tokens"
    )
    print(
        f"{line}: stock {stock.most / MIB:.0f} MiB, ours {ours.most / MIB:.0f}, "
        f"hard {hard / MIB:.0f}"
    )
