"""The prompt cache stays within --prompt-cache-bytes, and a model that goes leaves nothing.

In stock neither is so (control). One server for both: requests served alone, a batch that grows,
six at once, one larger than the limit, three models.
"""

from __future__ import annotations

import json

import pytest

from kit.harness import REPO, Inconclusive, Server, wait_until
from kit.models.big_model import STEP, big_kv_model, bytes_per_token, weight_bytes
from kit.streams import Stream

HEAD_DIM = 4096
# 32 KiB.
TOKEN = bytes_per_token(HEAD_DIM)
# Bytes: room for two of those served alone, or three of the others.
LIMIT = 20_000_000
FEED_FORWARD = 50_000
# 38 MB.
WEIGHTS = weight_bytes(FEED_FORWARD)
# Bytes that a server of the smallest model holds besides its weights.
SMALL = 2_000_000
OFF = {
    f"MLX_SHIM_{name}": "0"
    for name in ("OVERFULL_PROMPT_CACHE", "LEFTOVER_CACHE", "UNRETURNED_WEIGHTS")
}


class Metered(Server):
    """The stock server, which says what it holds (memory_meter)."""

    def __init__(self, line, model, log, **environ):
        meter = str(REPO / "tests" / "kit" / "programs" / "memory_meter.py")
        super().__init__(
            line,
            model,
            log,
            entry=(meter,),
            args=("--prompt-cache-bytes", str(LIMIT)),
            environ=environ,
        )
        self.seen = 0

    def figures(self):
        lines = [
            x[6:] for x in self.text().splitlines() if x.startswith("METER ") and x.endswith("}")
        ]
        return [json.loads(x) for x in lines][self.seen :]

    def since(self, inserted):
        """Figures since the last call, once enough entries are inserted and the loop is idle."""

        def settled():
            figures = self.figures()
            idle = figures and figures[-1]["at"] == "turn" and figures[-1]["batch"] == 0
            return idle and len(of(figures, "insert")) >= inserted

        assert wait_until(settled, 20), self.figures()[-3:]
        new = self.figures()
        self.seen += len(new)
        return new

    def ask(self, prompt, path="/v1/completions", **more):
        status, answer = self.post({"prompt": prompt, "max_tokens": 2, **more}, path)
        assert status == 200, answer
        return answer


def drive(server, folder):
    """{phase: its figures}, and how much of an early prompt the cache had at their end."""
    phases = {"boot": server.ready().since(1)}
    for n in range(4):
        server.ask(f"{n}: alone", seed=1)
    phases["alone"] = server.since(4)
    Stream(server, {"prompt": "it grows" + "." * STEP, "max_tokens": STEP + 20}).join()
    # In a batch its prompt is an entry as well, until it is done.
    phases["growing"] = server.since(2)
    streams = [
        Stream(server, {"prompt": f"{n}: at once" + "x" * 200, "max_tokens": 20}) for n in range(6)
    ]
    assert all(stream.join().done for stream in streams)
    phases["at once"] = server.since(12)
    messages = [{"role": "system", "content": "brief " * 20}, {"role": "user", "content": "hello"}]
    server.ask(None, "/v1/chat/completions", messages=messages)
    # Its system prompt is an entry as well.
    phases["chat"] = server.since(3)
    before = server.ask("small " * 20)
    phases["small"] = server.since(2)
    server.ask("large " * 120, seed=1)
    assert TOKEN * 6 * 120 > LIMIT
    phases["large"] = server.since(1)
    again = server.ask("small " * 20)
    # All but its last token was there.
    phases["again"] = server.since(1)
    assert before["choices"][0]["text"] == again["choices"][0]["text"]
    for name in ("second", "third"):
        model = big_kv_model(folder / name, head_dim=HEAD_DIM, feed_forward=FEED_FORWARD)
        server.ask("batched " * 10, model=str(model))
        server.ask("alone " * 10, model=str(model), seed=1)
        phases[name] = server.since(3)
    server.ask("the first")
    phases["back"] = server.since(2)
    return phases, again["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def first(tmp_path):
    return big_kv_model(tmp_path / "first", head_dim=HEAD_DIM)


def most(figures, *names):
    return max(sum(f[name] for name in names) for f in figures)


def of(figures, at):
    return [f for f in figures if f["at"] == at]


@pytest.mark.guard("overfull_prompt_cache", "leftover_cache", "unreturned_weights")
def test_within_its_bytes_and_gone_with_its_model(line, first, tmp_path):
    with Metered(line, first, tmp_path / "log") as server:
        phases, cached = drive(server, tmp_path)
        guards = server.get("/health")[1]["guards"]
    report(line, phases)
    assert {guards[name[9:].lower()] for name in OFF} == {"active"}
    assert not {"incompatible", "failed"} & set(guards.values()), guards
    (boot,) = of(phases["boot"], "loaded")
    for name, figures in phases.items():
        for f in figures:
            assert f["counted"] == 0 or f["counted"] + f["batch"] <= LIMIT, (name, f)
        end = figures[-1]
        weights = WEIGHTS if name in ("second", "third") else 0
        held = end["memory"] - boot["memory"] - weights
        assert held <= end["counted"] + SMALL, (
            f"{name}: {held} bytes are held, {end['counted']} counted"
        )
    assert most(phases["alone"], "counted") >= 2 * STEP * TOKEN, "the limit has room for two"
    assert cached > 100, "one that is too large pushes out no others"
    for name in ("second", "third", "back"):
        (load,) = of(phases[name], "load")
        assert load["entries"] == 0, "of the former model"
        assert load["memory"] + load["pool"] <= SMALL, (
            f"{name} does not find the machine empty: {load}"
        )
        assert of(phases[name], "insert"), "entries of this one are kept"


@pytest.mark.control("overfull_prompt_cache", "leftover_cache", "unreturned_weights")
def test_control_stock_exceeds_and_keeps(line, first, tmp_path):
    with Metered(line, first, tmp_path / "log", **OFF) as server:
        phases, _ = drive(server, tmp_path)
    report(line, phases)
    expect(most(phases["alone"], "counted") > 1.5 * LIMIT, "served alone it stays within the limit")
    expect(
        any(
            f["counted"] and f["counted"] + f["batch"] > 1.5 * LIMIT
            for f in of(phases["growing"], "turn")
        ),
        "room is made for a batch that grows",
    )
    expect(
        phases["at once"][-1]["counted"] > 1.5 * LIMIT,
        "those that finish in a batch stay within the limit",
    )
    loads = [load for name in ("second", "third", "back") for load in of(phases[name], "load")]
    expect(all(load["entries"] for load in loads), "the entries go with their model")
    expect(loads[-1]["memory"] > WEIGHTS, "the weights go before others are loaded")
    if line == "0.31.3":
        expect(most(loads, "pool") > SMALL, "the pool is cleared")


def expect(fault, otherwise):
    """The negative control: stock shows its fault."""
    if not fault:
        raise Inconclusive(otherwise)


def report(line, phases):
    """The figures for the documentation, in MB."""
    for name, figures in phases.items():
        counted, both = most(figures, "counted") / 1e6, most(figures, "counted", "batch") / 1e6
        loads = [f"{f['memory'] / 1e6:.1f} + {f['pool'] / 1e6:.1f}" for f in of(figures, "load")]
        end = f"{figures[-1]['counted'] / 1e6:.1f}, MLX {figures[-1]['memory'] / 1e6:.1f}"
        print(
            f"{line} {name}: counted {counted:.1f}, with the batch {both:.1f}; "
            f"at its end {end}; at a load {loads}"
        )
