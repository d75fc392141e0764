"""No cache class grows under the shim, by tokens or by turns, beyond what its keys and values take.

Where stock grows, stock runs too, as the control. A step evaluates only the returned keys and
values, as a model without rotary positions does. Every figure is in bytes of active memory, less
the bytes that the cache says it holds.
"""

from __future__ import annotations

import functools
import json
import subprocess

import pytest

from kit.harness import LINES, REPO, Inconclusive, clean_environ, python_of

# One worker measures, for all the cases.
pytestmark = pytest.mark.xdist_group("cache classes")

MEASURE = """
import copy, inspect, json, sys
import mlx.core as mx
from mlx_lm.models import cache as module
from mlx_lm.models.cache import *
from mlx_lm.models.cache import (
    ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, ChunkedKVCache,
    ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache, TokenBuffer,
)

STEPS, TURNS, WINDOW, D = 1000, 200, 32, 64


def update(cache, n=1, batch=1):
    # What one layer does in one step with n tokens. Returns the arrays that a model evaluates.
    if isinstance(cache, CacheList):
        return [update(c, n, batch) for c in cache.caches]
    if isinstance(cache, TokenBuffer):
        return cache.update_and_fetch(mx.ones((n,), mx.int32))
    if isinstance(cache, ArraysCache):
        cache[0] = mx.ones((batch, 4, D))
        cache.advance(n)
        return cache[0]
    if isinstance(cache, ChunkedKVCache):
        cache.maybe_trim_front()
    return cache.update_and_fetch(mx.ones((batch, 1, n, D)), mx.ones((batch, 1, n, D)))


def step(cache, n=1, batch=1):
    mx.eval(update(cache, n, batch))


def held(cache):
    return cache.state.nbytes if isinstance(cache, TokenBuffer) else cache.nbytes


def sample(cache):
    mx.synchronize()
    return mx.get_active_memory() - held(cache)


def slope(samples):
    # Temporaries come and go, so compare the least of the first half with the least of the second.
    # Leave out the first quarter: in it a batch gets its lasting size, and a slice keeps the whole
    # buffer, of which nbytes counts only a part.
    samples = samples[len(samples) // 4 :]
    half = len(samples) // 2
    return (min(samples[half:]) - min(samples[:half])) / half


def tokens(make):
    cache, batch = make()
    step(cache, 4, batch)
    samples = []
    for _ in range(STEPS):
        step(cache, 1, batch)
        samples.append(sample(cache))
    return slope(samples)


def copies(make):
    # A turn of one conversation: a copy of the kept cache, less its last tokens, and a few more.
    cache, batch = make()
    step(cache, 16, batch)
    samples = []
    for _ in range(TURNS):
        cache = copy.deepcopy(cache)
        if hasattr(cache, "trim") and cache.is_trimmable():
            cache.trim(3)
        for _ in range(3):
            step(cache, 1, batch)
        samples.append(sample(cache))
    return slope(samples)


def request(make, restore):
    # One more request, as a batch of one. Its prompt is padded on the right, or restored from a
    # history.
    single = make()
    if restore:
        step(single, 5)
    other = single.merge([single])
    other.prepare(lengths=[3], right_padding=[1])
    step(other, 4)
    other.finalize()
    for part in other.caches if isinstance(other, CacheList) else [other]:
        if isinstance(part, ArraysCache):
            # As a batch made with padding has it.
            part.left_padding = mx.array([0])
    return other


def requests(make, restore):
    # Requests join and leave a batch of three that is never empty. One that leaves takes a cache
    # along.
    cache = request(make, restore)
    cache.extend(request(make, restore))
    cache.extend(request(make, restore))
    stay = mx.array([1, 2, 3])
    samples = []
    for _ in range(TURNS):
        cache.extend(request(make, restore))
        for _ in range(3):
            step(cache, 1, 4)
        cache.extract(0)
        cache.filter(stay)
        step(cache, 1, 3)
        samples.append(sample(cache))
    return slope(samples)


def arrays(batch):
    made = ArraysCache(1, left_padding=[0] * batch)
    made.prepare(lengths=[9] * batch)
    return made


SINGLE = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "QuantizedKVCache": QuantizedKVCache,
    "RotatingKVCache": lambda: RotatingKVCache(WINDOW),
    "ChunkedKVCache": lambda: ChunkedKVCache(WINDOW),
    "ArraysCache": lambda: ArraysCache(1),
    "CacheList": lambda: CacheList(KVCache(), RotatingKVCache(WINDOW), ArraysCache(1)),
    "TokenBuffer": TokenBuffer,
}
BATCH = {
    "BatchKVCache": lambda b: BatchKVCache([0] * b),
    "BatchRotatingKVCache": lambda b: BatchRotatingKVCache(WINDOW, [0] * b),
    "ArraysCache, batch": arrays,
    "CacheList, batch": lambda b: CacheList(
        BatchKVCache([0] * b), BatchRotatingKVCache(WINDOW, [0] * b), arrays(b)
    ),
}
JOIN = {
    "BatchKVCache": SINGLE["KVCache"],
    "BatchRotatingKVCache": SINGLE["RotatingKVCache"],
    "ArraysCache, batch": SINGLE["ArraysCache"],
    "CacheList, batch": SINGLE["CacheList"],
}

found = {}
for name, make in SINGLE.items():
    pair = lambda make=make: (make(), 1)
    found[name] = {"tokens": tokens(pair), "copies": copies(pair)}
for name, make in BATCH.items():
    pair = lambda make=make: (make(2), 2)
    found[name] = {"tokens": tokens(pair), "copies": copies(pair)}
    for what, restore in (("requests", False), ("restored", True)):
        found[name][what] = requests(JOIN[name], restore)

classes = [c for _, c in inspect.getmembers(module, inspect.isclass)]
classes = [c for c in classes if c.__module__ == module.__name__]
caches = [c for c in classes if issubclass(c, module._BaseCache) and c is not module._BaseCache]
others = [c for c in classes if c not in caches]
caches += [c for c in others if hasattr(c, "update_and_fetch") or hasattr(c, "advance")]
print(json.dumps({"classes": sorted({c.__name__ for c in caches}), "found": found}))
"""


@functools.cache
def measured(release, shim, attempt=1):
    """Everything, in one process: the slopes by row and by activity, and the cache classes."""
    child = subprocess.run(
        [python_of(release), "-c", MEASURE],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(PYTHONPATH=str(REPO) if shim else None),
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


CLASSES = {
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "TokenBuffer",
}
BATCHES = ("BatchKVCache", "BatchRotatingKVCache", "ArraysCache, batch", "CacheList, batch")
ROWS = (*sorted(CLASSES), "ArraysCache, batch", "CacheList, batch")
CASES = [(row, what) for row in ROWS for what in ("tokens", "copies")]
CASES += [(row, what) for row in BATCHES for what in ("requests", "restored")]

# Bytes a token or turn. A leak is a buffer each time, and the least buffer has four bytes. A buffer
# that by chance is there at one sample (an evaluation has only started) makes four bytes in a half
# of 75 turns or more: far less than this.
BOUND = 1.0
STOCK_LEAKS = {case for case in CASES if case[0] in BATCHES and case[0] != "BatchRotatingKVCache"}
# Bytes a token or turn that stock must show.
LEAST = 3.0


def slope_of(release, row, what, shim, good):
    """One figure, measured again where it is not as expected.

    A leak shows each time; the temporaries of a busy machine do not.
    """
    for attempt in (1, 2, 3):
        slope = measured(release, shim, attempt)["found"][row][what]
        if good(slope):
            break
    return slope


@pytest.mark.guard("leaking_advance", "leaking_offset")
@pytest.mark.control("leaking_advance", "leaking_offset")
@pytest.mark.parametrize("release", LINES)
@pytest.mark.parametrize(("row", "what"), CASES)
def test_growth(release, row, what):
    ours = slope_of(release, row, what, shim=True, good=lambda slope: slope <= BOUND)
    print(f"{release} {row}, {what}: {ours:g} bytes a token or turn")
    assert ours <= BOUND
    if (row, what) in STOCK_LEAKS:
        stock = slope_of(release, row, what, shim=False, good=lambda slope: slope >= LEAST)
        if stock < LEAST or stock <= ours:
            raise Inconclusive(f"stock grew by {stock} bytes")
        print(f"stock: {stock:g}")


@pytest.mark.parametrize("release", LINES)
def test_there_are_no_other_cache_classes(release):
    assert set(measured(release, shim=True)["classes"]) == CLASSES
