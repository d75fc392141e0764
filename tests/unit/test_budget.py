"""How much memory a model leaves, and how much a token takes, told before the model is loaded."""

from __future__ import annotations

import copy
import importlib
import json
import math

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kit import families
from kit.harness import REPO
from kit.model_folders import weightless
from shim.cli import memory_budget
from shim.core import values
from shim.models import kv_cost
from shim.models.kv_cost import Cost, Layer
from shim.planning import budget, cache_cost, local_model

GIB, MIB = 1 << 30, 1 << 20
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
}


@pytest.mark.parametrize(
    ("total", "model", "soft", "hard"),
    [
        (64 * GIB, 20 * GIB, 47513, 54272),
        (64 * GIB, 0, 39321, 49152),
        (64 * GIB, 45 * GIB, int(0.85 * 65536), int(0.9 * 65536)),
        (64 * GIB, int(0.8 * 64 * GIB), int(0.85 * 65536), int(0.9 * 65536)),
    ],
)
def test_what_is_recommended(total, model, soft, hard):
    found = budget.recommended(total, model)
    assert found == (soft * MIB, hard * MIB)
    assert model < found.soft < found.hard < total
    told = [budget.as_setting(size) for size in found]
    assert told == [f"{soft}M", f"{hard}M"]
    assert [values.parse_memory(text) for text in told] == list(found), "a setting says the same"


def test_nothing_is_recommended_where_the_model_leaves_too_little():
    assert budget.recommended(64 * GIB, int(0.81 * 64 * GIB)) is None
    assert budget.recommended(64 * GIB, 100 * GIB) is None


def test_what_auto_comes_to():
    assert budget.wired(100 * GIB, 59 * GIB) == "off"
    assert budget.wired(100 * GIB, 61 * GIB) == "model+4G"
    for value in ("off", "model+4G"):
        values.parse_wired(value)


def test_how_many_contexts_fit():
    cost = Cost((Layer(1024, math.inf, 256, 0), Layer(512, 4096, 256, 0), Layer(0, math.inf, 1, 7)))
    each = 32768 * 1024 + 4096 * 512 + 7
    assert budget.how_many(cost, 3 * each, 32768) == 3
    assert budget.how_many(cost, 3 * each - 1, 32768) == 2
    assert budget.how_many(cost, -1, 32768) == 0
    assert budget.how_many(Cost(()), 100, 32768) is None
    assert budget.lengths(None) == [8192, 32768, 131072, 262144]
    assert budget.lengths(131072) == [8192, 32768, 131072]


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_a_token_takes_what_it_takes_in_a_model_that_runs(name):
    filled(families.build(name), cache_cost.of(copy.deepcopy(families.FAMILIES[name]), "float32"))


def test_layers_with_a_window():
    mx.random.seed(0)
    module = importlib.import_module("mlx_lm.models.gemma3_text")
    cost = cache_cost.of(GEMMA, "bfloat16")
    assert {layer.window for layer in cost.layers} == {32, math.inf}
    model = module.Model(module.ModelArgs.from_dict(GEMMA))
    model.set_dtype(mx.bfloat16)
    filled(model, cost)


def filled(model, cost):
    """A cache that has held 300 tokens tells the same cost."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3] * 100]), cache=cache), [layer.state for layer in cache])
    real = kv_cost.learn(cache)
    assert [(x.per_token, x.window, x.constant) for x in cost.layers] == [
        (x.per_token, x.window, x.constant) for x in real.layers
    ]


def test_a_huge_model_takes_no_memory():
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cost = cache_cost.of(LLAMA_70B, "bfloat16")
    assert cost.per_token == 80 * 8 * 128 * 2 * 2
    assert mx.get_peak_memory() - before < 64 * MIB
    assert cache_cost.of(LLAMA_70B, "float32").per_token == 2 * cost.per_token


def test_what_cannot_be_told_is_said(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (tmp_path / "model.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_file": "model.py"}')
    with pytest.raises(
        cache_cost.NotKnown, match="it brings code of its own, which the shim does not run"
    ):
        cache_cost.ask(tmp_path, "float16")
    assert not ran.exists()
    (tmp_path / "config.json").write_text('{"model_type": "no-such"}')
    with pytest.raises(
        cache_cost.NotKnown, match=r"^ValueError: Model type no-such not supported\.$"
    ):
        cache_cost.ask(tmp_path, "float16")
    monkeypatch.setattr(cache_cost, "LIMIT", 0.01)
    with pytest.raises(cache_cost.NotKnown, match="could not be built within"):
        cache_cost.ask(tmp_path, "float16")


def test_contexts_are_counted_below_the_limit_in_force(tmp_path, monkeypatch, capsys):
    """A token takes 2 layers * 2 heads * 64 * (key and value) * 2 bytes, 1 KiB."""
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 64,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 40000,
    }
    model = weightless(tmp_path / "model", GIB, **config)
    monkeypatch.setenv("MLX_SHIM_MEMORY_HARD", f"{1024 + 33}M")
    monkeypatch.setenv("MLX_SHIM_WIRED", "bogus")
    memory_budget.show(str(model), 64 * GIB)
    told = " ".join(capsys.readouterr().out.split())
    for what in (
        "weights 1.00 GiB, 2% of the memory",
        "MLX_SHIM_WIRED=stock in force",
        "soft none, hard 1.03 GiB in force",
        (
            "MLX_SHIM_MEMORY_SOFT=39731M MLX_SHIM_MEMORY_HARD=49408M a token's cache 1.0 KiB,"
            " bfloat16 room below hard 33.0 MiB"
        ),
        "8k tokens 8.0 MiB each, 4 at a time",
        "32k tokens 32.0 MiB each, 1 at a time longest alone 33792 tokens",
    ):
        assert what in told, told


def test_a_model_whose_caches_do_not_grow(tmp_path, capsys):
    config = {
        k: v for k, v in families.FAMILIES["mamba2"].items() if k != "max_position_embeddings"
    }
    memory_budget.show(str(weightless(tmp_path / "model", GIB, dtype="F32", **config)), 64 * GIB)
    told = capsys.readouterr().out
    assert "0.0 KiB, float32; 38.0 KiB whatever the length" in told
    assert "any: its caches do not grow" in told


COMPUTES = """\
import mlx.core as mx
from shim.models import kv_cost
from shim.planning import cache_cost
def learn(caches):
    kept = []
    while True:
        kept.append(mx.ones(1 << 20))
        mx.eval(kept)
kv_cost.learn, cache_cost.MOST_MEMORY = learn, 1 << 25
"""


def test_a_model_that_computes_is_stopped(tmp_path, monkeypatch):
    """Otherwise it would take the memory of all its weights."""
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(cache_cost, "_PROGRAM", COMPUTES + cache_cost._PROGRAM)
    (tmp_path / "config.json").write_text(json.dumps(families.FAMILIES["lfm2"]))
    with pytest.raises(cache_cost.NotKnown, match="it computes something"):
        cache_cost.ask(tmp_path, "float16")


def test_which_model_is_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weightless(tmp_path / "folder", 4 * GIB)
    assert local_model.find("folder", {}).name == "folder"
    snapshots = tmp_path / "hub" / "models--a--b" / "snapshots"
    for name in ("1", "2", "3"):
        weightless(snapshots / name, GIB)
    environ = {"HF_HOME": str(tmp_path)}
    assert local_model.find("a/b", environ).name == "3"
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text("2\n")
    assert local_model.find("a/b", environ).name == "2"
    assert local_model.find("a/b", {"HF_HUB_CACHE": str(tmp_path / "hub")}).name == "2"
    for name in ("", "a/c", "../hub", "x" * 5000, "a\0b", "~nobody-of-that-name/x", "hub"):
        with pytest.raises(local_model.NotHere):
            local_model.find(name, environ)


def test_a_folder_that_is_closed_is_no_model(tmp_path, monkeypatch):
    def closed(self):
        raise PermissionError(13, "Permission denied")

    # A stand-in: for root no folder is closed.
    monkeypatch.setattr("pathlib.Path.is_file", closed)
    with pytest.raises(local_model.NotHere, match="closed to this user"):
        local_model.find(str(tmp_path), {})


def test_what_its_weights_are(tmp_path):
    folder = weightless(tmp_path / "model", 4 * GIB, dtype="F16")
    assert local_model.size(folder) == 4 * GIB
    assert local_model.dtype(folder, {"torch_dtype": "bfloat16"}) == "float16", (
        "the weights tell the type, not config.json"
    )
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    )
    with pytest.raises(local_model.NotHere, match="1 of its weight files are not there"):
        local_model.size(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(local_model.NotHere, match="its weights cannot be read"):
        local_model.size(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(local_model.NotHere, match="cut short"):
        local_model.size(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(local_model.NotHere, match=r"no model\*\.safetensors"):
        local_model.size(folder)
    assert local_model.dtype(folder, {"text_config": {"dtype": "bfloat16"}}) == "bfloat16"
    assert local_model.dtype(folder, {}) == "float32"
    assert local_model.longest({"text_config": {"max_position_embeddings": 4096}}) == 4096
    assert local_model.longest({}) is None
