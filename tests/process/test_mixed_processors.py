"""Requests with and without logits processors in one batch: each gets the tokens it gets alone.

In stock 0.31.3 (the controls) the generation thread dies of it, or the processors of one that joins
later are not applied. From 0.32 the guard is retired and the same tests hold.
"""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest

from kit.harness import LINES, REPO, Inconclusive, Server, clean_environ, python_of, wait_until
from kit.streams import Stream
from shim.engine import fatal

OFF = {"MLX_SHIM_MIXED_PROCESSORS": "0"}
# The line that has the defect.
OLD = LINES[0]
CHUNK = 16

BATCHES = """
    import json, sys
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    model, _ = load(sys.argv[1])
    penalty = make_logits_processors(None, 1.7, 20)
    greedy = make_sampler(0.0)

    class Batch:
        def __init__(self, samplers):
            self.generator = BatchGenerator(model, prefill_step_size=16)
            self.tokens, self.running = {}, set()
            self.samplers = samplers

        def insert(self, start, length, n, processors):
            prompt = [(start * i + 3 * start) % 200 for i in range(length)]
            samplers = [greedy] if self.samplers else None
            (uid,) = self.generator.insert(
                [prompt], [n], samplers=samplers, logits_processors=[processors]
            )
            self.running.add(uid)
            return uid

        def step(self):
            for r in self.generator.next()[1]:
                self.tokens.setdefault(r.uid, []).append(r.token)
                if r.finish_reason is not None:
                    self.running.remove(r.uid)

        def finish(self):
            while self.running:
                self.step()
            return [self.tokens[uid] for uid in sorted(self.tokens)]

    plain, other, short = (7, 33, 30, []), (11, 17, 20, penalty), (5, 17, 4, [])

    def alone(request):
        batch = Batch(True)
        batch.insert(*request)
        return batch.finish()[0]

    def both_in_prefill(samplers):
        batch = Batch(samplers)
        batch.insert(*plain)
        # Half of its prompt.
        batch.step()
        # This one ends its own prompt in the same step.
        batch.insert(*other)
        return batch.finish()

    def joins_later(samplers):
        batch = Batch(samplers)
        batch.insert(*plain)
        batch.insert(*short)
        batch.insert(*short)
        while len(batch.running) > 1:
            batch.step()
        batch.insert(*other)
        tokens = batch.finish()
        return [tokens[0], tokens[3]]

    found = {"alone": [alone(plain), alone(other)], "without": alone((*other[:3], []))}
    for case in (joins_later, both_in_prefill):
        for samplers in (True, False):
            try:
                found[f"{case.__name__} {samplers}"] = case(samplers)
            except TypeError as error:
                found[f"{case.__name__} {samplers}"] = str(error)
    print(json.dumps(found))
"""


def batches(line, model, **environ):
    child = subprocess.run(
        [python_of(line), "-c", textwrap.dedent(BATCHES), str(model)],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(**({"PYTHONPATH": str(REPO)} | environ)),
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.guard("mixed_processors")
@pytest.mark.control("mixed_processors")
def test_batches_that_mix(line, tiny):
    found = batches(line, tiny)
    alone, without = found.pop("alone"), found.pop("without")
    assert alone[1] != without, "the penalty changes something"
    assert all(tokens == alone for tokens in found.values()), (alone, found)
    assert len(found) == 4
    if line == OLD:
        stock = batches(line, tiny, **OFF)
        print({case: tokens == alone or tokens for case, tokens in stock.items()})
        if "NoneType" not in stock["both_in_prefill True"] or stock["joins_later True"] == alone:
            raise Inconclusive(f"stock shows no fault: {stock}")


def meet(server):
    """A plain request, and one with a penalty.

    The second is admitted while the first has one chunk of its prompt to go.
    """
    plain = Stream(server, {"prompt": "p" * (3 * CHUNK + 1), "max_tokens": 20})
    assert wait_until(lambda: any(f"keepalive {CHUNK}/" in line for line in plain.lines), 60, 0.01)
    other = Stream(server, {"prompt": "penalty", "max_tokens": 12, "repetition_penalty": 1.7})
    return plain, other


@pytest.mark.guard("mixed_processors")
@pytest.mark.control("mixed_processors")
def test_over_http(line, faulty, tmp_path):
    # Longer than the half second for which stock computes before it looks for the next request, and
    # long enough for that request to arrive meanwhile.
    model = faulty(kind="none", prefill_delay=1.5)
    model.hurry()
    arguments = (*model.args, "--prefill-step-size", str(CHUNK), "--prompt-cache-size", "0")
    with Server(line, model.path, tmp_path / "log", args=arguments) as server:
        state = server.ready().get("/health")[1]["guards"]["mixed_processors"]
        assert state == ("active" if line == OLD else "retired")
        model.take_its_time()
        streams = meet(server)
        assert wait_until(lambda: server.get("/health")[1]["in_flight"] == 2, 30, 0.01)
        model.hurry()
        streams = [stream.join() for stream in streams]
        for stream in streams:
            assert stream.done
            assert Stream(server, stream.body).join().text == stream.text
    if line == OLD:
        with Server(line, model.path, tmp_path / "stock", args=arguments, environ=OFF) as server:
            server.ready()
            model.take_its_time()
            meet(server)
            if server.wait_exit(60) != fatal.EX_SOFTWARE or "NoneType" not in server.text():
                raise Inconclusive(f"stock survives it: {server.text()[-2000:]}")
