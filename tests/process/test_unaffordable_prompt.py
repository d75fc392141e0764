"""A prompt that cannot fit below MLX_SHIM_MEMORY_HARD is refused before it is started, once it is known what a token takes."""

from __future__ import annotations

import re

import big_model
import psutil
import pytest
from harness import Inconclusive, Server, Stream, wait_until

MIB = 2**20
ROOM = 40 * MIB  # 1,280 tokens of 32 KiB
TOO_LONG = {"prompt": "z" * 2000, "max_tokens": 1, "temperature": 0}
FITS = {"prompt": "y" * 500, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return big_model.big_kv_model(tmp_path_factory.mktemp("models") / "big")


def resident(server):
    return psutil.Process(server.pid).memory_info().rss


def test_400_with_what_would_fit_and_503_beside_others(line, big, tmp_path):
    with Server(line, big, tmp_path / "stock", environ={"MLX_SHIM": "0"}) as server:
        assert server.ready().post({"prompt": "warm", "max_tokens": 2})[0] == 200
        base = resident(server)
        alone = server.post(FITS)[1]["choices"][0]["text"]
        status = server.post(TOO_LONG)[0]
        if status != 200 or resident(server) < base + ROOM:
            raise Inconclusive(f"stock answered {status} and holds {resident(server) - base} more")
    # Soft and what it does is another guard's.
    environ = {"MLX_SHIM_MEMORY_HARD": str(base + ROOM), "MLX_SHIM_EXHAUSTED_MEMORY": "0"}
    with Server(line, big, tmp_path / "log", environ=environ) as server:
        assert server.ready().post(FITS)[1]["choices"][0]["text"] == alone, "nothing is known before the first"
        status, told = server.post(TOO_LONG)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        message = told["error"]["message"]
        assert "has 2000 tokens" in message
        fit = int(re.search(r"accepted: (\d+)", message)[1])
        assert 500 < fit < 2000, message
        status, told = server.post({"prompt": [1] * (fit + 300), "max_tokens": 1})
        assert status == 400, told
        assert server.post(FITS)[1]["choices"][0]["text"] == alone
        busy = Stream(server, {"prompt": "x" * 700, "max_tokens": 400, "temperature": 0})
        assert wait_until(lambda: re.search(r"progress: 699/(699|700)", server.text()), 60, 0.005), "it decodes"
        status, told = server.post({"prompt": "w" * (fit - 100), "max_tokens": 1})
        assert (status, told["error"]["code"]) == (503, "memory_pressure")
        assert busy.join().done, "whoever was there first goes on"
        assert wait_until(lambda: server.post({"prompt": "w" * (fit - 100), "max_tokens": 1})[0] == 200, 20), (
            "it fits without the others"
        )
