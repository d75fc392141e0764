"""`ArraysCache.advance` leaks nothing under the shim, in every release.

Stock leaks four bytes a call (the control).
"""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest

from kit.harness import NEWEST, REPO, Inconclusive, clean_environ, python_of

RELEASES = ("0.31.3", "0.32.0", "0.32.2")
OFF = {"MLX_SHIM_LEAKING_ADVANCE": "0"}


def run(release, code, *arguments, **environ):
    """The JSON that a program prints on its last line, under the shim."""
    child = subprocess.run(
        [python_of(release), "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(**({"PYTHONPATH": str(REPO)} | environ)),
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""
    return json.loads(child.stdout.splitlines()[-1])


ADVANCES = """
    import json, sys
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache
    CALLS = 20_000
    grown = {}
    for read in (False, True):
        cache = ArraysCache(2, left_padding=[3, 0])
        cache.prepare(lengths=[CALLS, CALLS])
        mx.eval(cache.left_padding, cache.lengths)
        before = mx.get_active_memory()
        for _ in range(CALLS):
            cache.advance(1)
            if read:
                cache.lengths, cache.left_padding, cache.state, cache.make_mask(1)
        grown[str(read)] = (mx.get_active_memory() - before) / CALLS
        values = (cache.left_padding, cache.lengths)
        mx.eval(values)
        grown["values"] = [v.tolist() for v in values]
        cache.left_padding, cache.lengths = values
        mx.eval(cache.left_padding, cache.lengths)
    print(json.dumps(grown))
"""


@pytest.mark.guard("leaking_advance")
@pytest.mark.control("leaking_advance")
@pytest.mark.parametrize("release", RELEASES)
def test_twenty_thousand_advances(release):
    ours = run(release, ADVANCES)
    assert ours["False"] == ours["True"] == 0
    assert ours["values"] == [[3 - 20_000, -20_000], [0, 0]]
    stock = run(release, ADVANCES, **OFF)
    assert stock["values"] == ours["values"]
    # Four bytes a call and field. Both fields are set here.
    if stock["False"] != 8.0:
        raise Inconclusive(f"stock grew by {stock['False']} bytes a call")


EQUIVALENCE = """
    import copy, json, pickle, sys
    import mlx.core as mx
    from mlx_lm.models import cache as module
    from mlx_lm.models.cache import ArraysCache

    class Sub(ArraysCache):
        pass

    seen = []

    def note(what, cache):
        arrays = (cache.left_padding, cache.lengths, cache.make_mask(3))
        seen.append([what, [None if a is None else a.tolist() for a in arrays]])

    for kind in (ArraysCache, Sub):
        a = kind(2, left_padding=[2, 0, 1])
        a[0], a[1] = mx.ones((3, 2)), mx.zeros((3, 1))
        note("new", a)
        a.advance(2); a.advance(3)
        note("advanced", a)
        a.prepare(lengths=[9, 8, 7])
        a.advance(1)
        note("prepared and advanced", a)
        a.filter(mx.array([0, 2]))
        a.advance(1)
        note("filtered", a)
        b = kind(2, left_padding=[4])
        b[0], b[1] = mx.ones((1, 2)), mx.zeros((1, 1))
        b.prepare(lengths=[5])
        b.advance(2)
        a.extend(b)
        a.advance(1)
        note("extended", a)
        note("copied", copy.copy(a))
        note("deep-copied", copy.deepcopy(a))
        deep = copy.deepcopy(a); deep.advance(5)
        note("the copy advanced", deep); note("the original did not", a)
        note("pickled", pickle.loads(pickle.dumps(a)))
        note("extracted", a.extract(1))
        note("merged", kind.merge([kind(2), kind(2)]))
        # As a model may assign.
        a.lengths = a.lengths - 1
        a.advance(1)
        note("assigned", a)
        a.advance(mx.array(2))
        note("advanced by an array", a)
        state = a.state
        try:
            again = kind.from_state(state)
        # Until 0.31.3 it wanted the other state too.
        except TypeError:
            again = kind.from_state(state, a.meta_state)
        note("from state", again)
        a.finalize()
        a.advance(1)
        note("finalized", a)
        seen.append(sorted(k for k in a.__reduce_ex__(4)[2]))
    mx_file = sys.argv[1]
    one = ArraysCache(2); one[0], one[1] = mx.ones((1, 2)), mx.zeros((1, 1)); one.advance(4)
    try:
        module.save_prompt_cache(mx_file, [one])
        (loaded,) = module.load_prompt_cache(mx_file)
        note("loaded", loaded)
    except Exception as error:
        seen.append(repr(type(error)))
    print(json.dumps(seen))
"""


@pytest.mark.guard("leaking_advance")
@pytest.mark.parametrize("release", RELEASES)
def test_whoever_reads_gets_what_stock_gives(release, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    assert run(release, EQUIVALENCE, file) == run(release, EQUIVALENCE, file, **OFF)


@pytest.mark.guard("leaking_advance")
def test_it_retires_where_upstream_is_cured():
    cured = """
        import sys, importlib.machinery as m
        class Cure:
            def find_spec(self, name, path=None, target=None):
                if name != "mlx_lm.models.cache": return None
                spec = m.PathFinder.find_spec(name, path)
                run = spec.loader.exec_module
                def exec_module(module):
                    run(module)
                    module.ArraysCache.advance = ADVANCE
                spec.loader.exec_module = exec_module
                return spec
        sys.meta_path.append(Cure())
        sys.meta_path.remove(m.PathFinder); sys.meta_path.append(m.PathFinder)
        import mlx_lm.models.cache, json
        modules = sys.modules.items()
        report = next(m for name, m in modules if name.endswith("shim.core.report"))
        print(json.dumps(str(report.states["leaking_advance"])))
    """
    calm = cured.replace("ADVANCE", "lambda self, n: None")
    assert run(NEWEST, calm) == "retired (8 calls of advance hold no memory)"
    odd = cured.replace(
        "ADVANCE",
        "lambda self, n: self.cache.pop() if self.cache else setattr(self, 'left_padding', None)",
    )
    assert run(NEWEST, odd).startswith("incompatible (active memory changed by -")


MANY = """
    import json
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache
    cache = ArraysCache(1, left_padding=[0, 0, 0])
    cache[0] = mx.zeros((3, 2))
    mx.eval(cache[0], cache.left_padding)
    sizes = []
    # A request joins and one leaves, in a batch that is never empty.
    for turn in range(400):
        other = ArraysCache(1, left_padding=[0])
        other[0] = mx.zeros((1, 2))
        cache.extend(other)
        cache.advance(1)
        cache.filter(mx.array([1, 2, 3]))
        mx.eval(cache[0])
        mx.synchronize()
        sizes.append(mx.get_active_memory())
    print(json.dumps((sizes[-1] - sizes[199]) / 200))
"""


@pytest.mark.guard("leaking_advance")
@pytest.mark.control("leaking_advance")
@pytest.mark.parametrize("release", RELEASES)
def test_requests_that_join_and_leave_for_ever(release):
    """Stock's chain grows with every change of the batch too."""
    assert run(release, MANY) == 0
    if run(release, MANY, **OFF) <= 0:
        raise Inconclusive("stock does not grow here")
