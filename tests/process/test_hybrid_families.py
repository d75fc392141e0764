"""Every family of models that advances an ArraysCache: no leak, and the same bits as stock.

The tokens and the logprobs are compared.
"""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest

from kit.families import FAMILIES, IMPOSSIBLE
from kit.harness import LINES, REPO, VENVS, Inconclusive, clean_environ, python_of

OFF = {"MLX_SHIM_LEAKING_ADVANCE": "0", "MLX_SHIM_LEAKING_OFFSET": "0"}
# Tokens of a run, and the first and last token at which its memory is looked at. Both are between
# two of the steps of 256 tokens by which KV caches grow.
SHORT = (512, 305, 505)
LONG = (2000, 1570, 1770)
# One of each way to leak: three linear layers, four, and three of a model that also uses `offset`.
LONG_RUNS = {("0.32.2", "qwen3_next"), ("0.32.2", "mamba2"), ("0.32.2", "nemotron_h")}

# Four prompts of different lengths, so that there is padding. Three leave early, one joins in the
# middle, and one continues from the cache of a request that has left. Then one goes on alone, and
# its memory is looked at.
BATCH = """
    import copy, hashlib, json, os, sys
    # Its two threads take turns: on one core they need a fifth less processor time.
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    import mlx.core as mx
    import numpy as np
    sys.path.insert(0, sys.argv[1])
    from kit.families import build
    from mlx_lm.generate import BatchGenerator

    TOKENS, FIRST, LAST = map(int, sys.argv[3:6])
    model = build(sys.argv[2])
    generator = BatchGenerator(model)
    lengths = (3, 9, 17, 5)
    prompts = [[(5 * n + 3 * i) % 60 + 1 for i in range(l)] for n, l in enumerate(lengths)]
    uids = generator.insert(prompts, max_tokens=[TOKENS, 40, 25, 60])
    seen = {uid: hashlib.sha256() for uid in uids}
    tokens = {uid: [] for uid in uids}
    net, left = [], 0
    while tokens[uids[0]] is not None and len(tokens[uids[0]]) < TOKENS:
        for r in generator.next()[1]:
            tokens[r.uid].append(r.token)
            seen[r.uid].update(np.array(r.logprobs.astype(mx.float32)).tobytes())
            if r.finish_reason is not None:
                left += 1
                # This one joins in the middle.
                if left == 1:
                    new = generator.insert([[7, 8, 9, 10]], max_tokens=[30])
                # This one reuses the cache of the one that leaves.
                if left == 2:
                    cache = copy.deepcopy(r.prompt_cache)
                    new = generator.insert(
                        [[11, 12]], max_tokens=[30], caches=[cache], all_tokens=[list(r.all_tokens)]
                    )
                if left in (1, 2):
                    seen[new[0]], tokens[new[0]] = hashlib.sha256(), []
        if FIRST <= len(tokens[uids[0]]) < LAST:
            # The next step is under way already: let its temporaries go.
            mx.synchronize()
            net.append(mx.get_active_memory() - generator.prompt_cache_nbytes)
    print(json.dumps({
        "tokens": tokens, "logprobs": {uid: h.hexdigest() for uid, h in seen.items()},
        # The least of each half, because temporaries come and go.
        "leak": (min(net[100:]) - min(net[:100])) / 100,
        "arrays": sum(type(c).__name__ == "ArraysCache" for c in model.make_cache()),
    }))
"""


def run(line, family, **environ):
    length = LONG if (line, family) in LONG_RUNS else SHORT
    child = subprocess.run(
        [
            python_of(line),
            "-c",
            textwrap.dedent(BATCH),
            str(REPO / "tests"),
            family,
            *map(str, length),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(**({"PYTHONPATH": str(REPO)} | environ)),
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


def modules(line):
    (folder,) = (VENVS / line).glob("lib/python3*/site-packages/mlx_lm/models")
    return folder


CASES = [
    (line, family)
    for line in LINES
    for family in FAMILIES
    if (modules(line) / f"{family}.py").exists()
]


@pytest.mark.guard("leaking_advance", "leaking_offset")
@pytest.mark.control("leaking_advance")
@pytest.mark.parametrize(("line", "family"), CASES)
def test_a_family(line, family):
    ours, stock = run(line, family), run(line, family, **OFF)
    # A busy machine's temporaries, or a leak: a leak shows each time.
    if ours["leak"] >= 2 or stock["leak"] < 3:
        ours, stock = run(line, family), run(line, family, **OFF)
    print(
        f"{line} {family}: bytes a token, stock {stock['leak']:g}, ours {ours['leak']:g} "
        f"({ours['arrays']} layers)"
    )
    assert ours["tokens"] == stock["tokens"]
    assert ours["logprobs"] == stock["logprobs"], "bit for bit"
    assert ours["leak"] < 2, "a slope: a token that leaked anything at all would show as four"
    if stock["leak"] < 3:
        raise Inconclusive(f"stock leaks {stock['leak']} bytes a token")


@pytest.mark.parametrize("line", LINES)
def test_no_family_is_forgotten(line):
    assert set(CASES) >= LONG_RUNS
    callers = {path.stem for path in modules(line).glob("*.py") if ".advance(" in path.read_text()}
    assert callers <= set(FAMILIES) | set(IMPOSSIBLE)


# Metal's cap in small: buffers of four bytes that are never freed, counted between two growths of
# the KV cache.
CAP = """
    import json, sys
    import mlx.core as mx
    sys.path.insert(0, sys.argv[1])
    from kit.families import build
    from mlx_lm.generate import BatchGenerator
    model = build(sys.argv[2])
    limit = int(sys.argv[3])
    generator = BatchGenerator(model)
    generator.insert([[1, 2, 3, 4, 5]], max_tokens=[5000])
    tokens, held, died = 0, [], None
    while tokens < 500 and died is None:
        tokens += len(generator.next()[1])
        if tokens >= 260:
            mx.synchronize()
            held.append(mx.get_active_memory() - generator.prompt_cache_nbytes)
            # Temporary buffers come and go: the least of the last few counts.
            if len(held) > 20 and (min(held[-10:]) - min(held[:10])) / 4 >= limit:
                died = tokens - 260
    print(json.dumps([sum(type(c).__name__ == "ArraysCache" for c in model.make_cache()), died]))
"""


@pytest.mark.guard("leaking_advance")
@pytest.mark.control("leaking_advance")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2"])
def test_the_cap_in_small(line, family):
    """Stock crosses a limit of L buffers after L / (linear layers - 1) tokens, ours never."""
    limit = 300
    arguments = [
        python_of(line),
        "-c",
        textwrap.dedent(CAP),
        str(REPO / "tests"),
        family,
        str(limit),
    ]
    results = []
    for environ in ({}, OFF):
        child = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            check=False,
            env=clean_environ(PYTHONPATH=str(REPO), **environ),
        )
        assert child.returncode == 0, child.stderr
        results.append(json.loads(child.stdout.splitlines()[-1]))
    (linear, ours), (_, stock) = results
    print(f"{line} {family}: a limit of {limit} is crossed after {stock} tokens, ours {ours}")
    assert ours is None
    if stock is None or abs(stock - limit / (linear - 1)) > 30:
        raise Inconclusive(
            f"stock crossed it after {stock} tokens, not about {limit / (linear - 1):.0f}"
        )
