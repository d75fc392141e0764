"""The search in the prompt cache finds the same as stock, in time proportional to its steps."""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest

from kit.harness import REPO, Inconclusive, clean_environ, python_of

# Tries of few different tokens, so that prefixes, forks and ties are common. Entries come and go as
# in the prompt cache.
EQUIVALENCE = """
    import json, random, sys
    from mlx_lm.models import cache
    from shim.guards.quadratic_search import searching

    search = searching(cache.PromptTrieResult)
    fields = ("model", "exact", "shorter", "longer", "common_prefix")
    chance, searches, longer, ties = random.Random(int(sys.argv[1])), 0, 0, 0
    for n in range(4000):
        trie, entries, tokens = cache.PromptTrie(), [], range(chance.randint(1, 4))
        some = lambda most: [chance.choice(tokens) for _ in range(chance.randint(0, most))]
        for step in range(chance.randint(0, 12)):
            entry = some(9)
            if trie.add("m", entry, step) is None:
                entries.append(entry)
            if chance.random() < 0.2:
                gone = [(length, entry[:length]) for length, _ in trie.pop_prefixes("m", entry)]
                entries = [e for e in entries if e not in [g for _, g in gone]]
            if chance.random() < 0.2 and entries:
                trie.pop("m", entries.pop(chance.randrange(len(entries))))
        for prompt in [some(7) for _ in range(5)] + [e[:-1] for e in entries] + entries:
            for model in ("m", "other"):
                stock, ours = trie.search(model, prompt), search(trie, model, prompt)
                same = all(getattr(stock, f) == getattr(ours, f) for f in fields)
                assert same, (entries, prompt, stock, ours)
                searches += 1
                if stock.longer is not None:
                    longer += 1
                    at = stock.common_prefix
                    alike = [e for e in entries if e[:at] == prompt[:at]]
                    ties += sum(len(e) == len(stock.longer) for e in alike) > 1
    print(json.dumps([searches, longer, ties]))
"""

# One deep entry of the prompt cache, looked up as the server does.
DEEP = """
    import json, sys, time
    import mlx_lm.server
    from mlx_lm.models.cache import LRUPromptCache

    entries = LRUPromptCache()
    for n in range(2):
        entries.insert_cache("model", [1, 2, 3, 4, *range(10, 10 + int(sys.argv[1])), n], [])
    start = time.thread_time()
    found, rest = entries.fetch_nearest_cache("model", [1, 2, 3, 4, 5, 6])
    print(json.dumps([time.thread_time() - start, len(rest)]))
"""


def run(line, script, *arguments, **environ):
    child = subprocess.run(
        [python_of(line), "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(**({"PYTHONPATH": str(REPO)} | environ)),
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.guard("quadratic_search")
def test_it_finds_what_stock_finds(line):
    searches, longer, ties = run(line, EQUIVALENCE, "1", MLX_SHIM_QUADRATIC_SEARCH="0")
    print(
        f"{line}: {searches} searches, {longer} of them with a longer entry, "
        f"{ties} with several as short"
    )
    assert searches > 50_000
    assert longer > 10_000
    assert ties > 300


@pytest.mark.guard("quadratic_search")
@pytest.mark.control("quadratic_search")
def test_a_deep_entry_costs_no_time(line):
    """Linear, and no recursion. Stock takes as long for a fraction of the tokens, or longer."""
    seconds, rest = run(line, DEEP, "300000")
    assert rest == 2, "the four tokens that are shared are taken"
    assert seconds < 10
    small, _ = run(line, DEEP, "20000")
    stock, _ = run(line, DEEP, "20000", MLX_SHIM_QUADRATIC_SEARCH="0")
    print(
        f"{line}: 20,000 tokens: stock {stock:.2f} s, ours {small:.3f} s; "
        f"300,000 tokens: {seconds:.2f} s"
    )
    if stock < 5 * small:
        raise Inconclusive(f"stock takes {stock} s")
