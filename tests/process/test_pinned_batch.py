"""An entry of the prompt cache owns the bytes that are counted for it.

In stock it pins the batch it came from (the control).
"""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest

from kit.harness import LINES, REPO, Inconclusive, clean_environ, python_of
from shim.cli import tiny_model

# Eight requests of different lengths in one batch, inserted one cache after another, as
# mlx_lm.server does it.
BATCH = """
    import gc, json, sys
    import mlx.core as mx
    from mlx_lm import load, stream_generate
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

    model, tokenizer = load(sys.argv[1])
    entries = LRUPromptCache(20)
    tokens = {}

    def held():
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        return mx.get_active_memory()

    before = held()

    def serve():
        generator = BatchGenerator(model, prefill_step_size=64)
        prompts = [[(7 * n + i) % 250 for i in range(200 + 300 * n)] for n in range(8)]
        uids = generator.insert(prompts, max_tokens=[10 + n for n in range(8)])
        running = set(uids)
        while running:
            _, responses = generator.next()
            for r in responses:
                tokens.setdefault(r.uid, []).append(r.token)
                if r.finish_reason is not None:
                    entries.insert_cache(
                        "model", r.all_tokens[:], r.prompt_cache, cache_type="assistant"
                    )
                    running.remove(r.uid)
        generator.close()

    # As a request with a seed is served.
    def serve_alone():
        cache = make_prompt_cache(model)
        prompt = [(11 * i) % 250 for i in range(500)]
        answer = stream_generate(model, tokenizer, prompt, max_tokens=20, prompt_cache=cache)
        said = [r.token for r in answer]
        entries.insert_cache("model", prompt + said, cache)

    serve()
    serve_alone()
    counted, bytes_held = entries.nbytes, held() - before
    # An entry is as good as before: go on from it.
    prompt = [(7 * 3 + i) % 250 for i in range(200 + 300 * 3)] + tokens[3] + [1, 2]
    cache, rest = entries.fetch_nearest_cache("model", prompt)
    generator = BatchGenerator(model)
    generator.insert([rest], max_tokens=[20], caches=[cache], all_tokens=[prompt[: -len(rest)]])
    more = []
    while len(more) < 20:
        more += [r.token for r in generator.next()[1]]
    print(json.dumps([counted, bytes_held, sorted(tokens.items()), len(rest), more]))
"""


def run(line, model, **environ):
    child = subprocess.run(
        [python_of(line), "-c", textwrap.dedent(BATCH), str(model)],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(**({"PYTHONPATH": str(REPO)} | environ)),
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.guard("pinned_batch")
@pytest.mark.control("pinned_batch")
@pytest.mark.parametrize("line", LINES)
def test_accounted_equals_held(line, tmp_path):
    model = tiny_model.make(tmp_path / "model")
    counted, held, *tokens = run(line, model)
    print(f"{line}: counted {counted / 1e6:.2f} MB, held {held / 1e6:.2f} MB")
    assert abs(held - counted) <= 0.01 * counted
    stock_counted, stock_held, *stock_tokens = run(line, model, MLX_SHIM_PINNED_BATCH="0")
    print(f"{line}, stock: counted {stock_counted / 1e6:.2f} MB, held {stock_held / 1e6:.2f} MB")
    assert tokens == stock_tokens, "never a token changes"
    if stock_held < 1.2 * stock_counted:
        raise Inconclusive(f"stock holds {stock_held} bytes for {stock_counted}")
