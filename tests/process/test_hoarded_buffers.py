"""With MLX_SHIM_CACHE_LIMIT=0 MLX keeps no memory of freed arrays; stock (the control) does."""

from __future__ import annotations

import json

import pytest

from kit.harness import REPO, Inconclusive, Server, wait_until
from kit.models.big_model import big_kv_model

METER = str(REPO / "tests" / "kit" / "programs" / "memory_meter.py")
# Bytes. Stock keeps tens of times as much.
LEAST_KEPT = 1_000_000
NONE = {"MLX_SHIM_CACHE_LIMIT": "0"}


def kept(line, model, log, environ):
    """The most bytes in MLX's pool between two turns of the loop, over a few requests."""
    with Server(line, model, log, entry=(METER,), environ=environ) as server:
        server.ready()
        for n in range(3):
            assert server.post({"prompt": f"{n}" * 400, "max_tokens": 4})[0] == 200

        def figures():
            said = [x[6:] for x in server.text().splitlines() if x.startswith("METER {")]
            turns = [json.loads(x) for x in said if x.endswith("}")]
            return [turn for turn in turns if turn["at"] == "turn" and turn["batch"] == 0]

        assert wait_until(lambda: figures() and figures()[-1]["entries"] >= 3, 20)
        return max(turn["pool"] for turn in figures())


@pytest.mark.guard("hoarded_buffers")
@pytest.mark.control("hoarded_buffers")
def test_what_mlx_keeps_of_freed_arrays(line, tmp_path):
    """The setting alone makes no difference: with the guard off it has no effect."""
    model = big_kv_model(tmp_path / "model")
    ours = kept(line, model, tmp_path / "log", NONE)
    off = kept(line, model, tmp_path / "off", NONE | {"MLX_SHIM_HOARDED_BUFFERS": "0"})
    print(f"{line}: stock keeps {off / 1e6:.1f} MB, ours {ours / 1e6:.1f} MB")
    assert ours == 0
    if off < LEAST_KEPT:
        raise Inconclusive(f"stock keeps {off} bytes")
