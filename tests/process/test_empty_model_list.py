"""/v1/models answers whatever the Hugging Face cache folder is; in stock its body is empty."""

from __future__ import annotations

import pytest

from kit.harness import NEWEST, Inconclusive, Server
from shim.guards import empty_model_list

MADE = {
    "absent": lambda cache: None,
    "a file": lambda cache: cache.write_text("no folder"),
    "an entry that cannot be read": lambda cache: make_entry(
        cache / "models--some--broken", b"\xff\xfe"
    ),
}
FILES = ("config.json", "model.safetensors.index.json", "tokenizer_config.json")


def make_entry(folder, reference=b"main-revision"):
    """A repository in the cache, as huggingface_hub lays it out."""
    snapshot = folder / "snapshots" / "main-revision"
    snapshot.mkdir(parents=True)
    for name in FILES:
        (snapshot / name).write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_bytes(reference)


def names(server, path="/v1/models"):
    status, answer = server.get(path)
    assert status == 200
    return [model["id"] for model in answer["data"]] if isinstance(answer, dict) else answer


@pytest.mark.guard("empty_model_list")
@pytest.mark.control("empty_model_list")
@pytest.mark.parametrize("guarded", [True, False])
def test_what_the_server_lists(line, tiny, tmp_path, guarded):
    """Each request looks at the folder again, so one server sees every kind of it."""
    cache = tmp_path / "home" / "hub"
    cache.parent.mkdir()
    environ = {"HF_HOME": str(cache.parent), "HF_HUB_CACHE": None} | (
        {} if guarded else {"MLX_SHIM_EMPTY_MODEL_LIST": "0"}
    )
    with Server(line, tiny, tmp_path / "log", environ=environ) as server:
        server.ready()
        for kind, make in MADE.items():
            if cache.is_file():
                cache.unlink()
            make(cache)
            found = names(server)
            if guarded:
                assert found == [str(tiny.resolve())], kind
            elif found != "":
                raise Inconclusive(f"stock answers {found} where the folder is {kind}")
        if guarded:
            said = [line for line in server.shim_lines() if "lists nothing" in line]
            assert len(said) == len(MADE), "once each"
            names(server)
            assert len([line for line in server.shim_lines() if "lists nothing" in line]) == len(
                MADE
            )
            (cache / "models--some--broken" / "refs" / "main").write_text("main-revision")
            assert names(server) == ["some/broken", str(tiny.resolve())], (
                "a folder that can be read, as with stock"
            )


@pytest.mark.guard("empty_model_list")
def test_a_scan_that_succeeds_is_stocks():
    told = object()
    assert empty_model_list._Scan()(lambda: told, None, (), {}) is told


@pytest.mark.guard("empty_model_list")
@pytest.mark.parametrize(
    "error", [PermissionError("no"), RuntimeError("a loop of links"), ValueError("x")]
)
def test_any_failure_is_an_empty_list(error, capfd):
    def scan_cache_dir():
        raise error

    assert empty_model_list._Scan()(scan_cache_dir, None, (), {}).repos == frozenset()
    assert str(error) in capfd.readouterr().err


@pytest.mark.guard("any_model")
@pytest.mark.control("any_model")
@pytest.mark.parametrize("guarded", [True, False])
def test_the_list_has_only_what_a_request_may_name(tiny, tmp_path, guarded):
    """With a cache and, at first, without one."""
    cache = tmp_path / "home" / "hub"
    environ = {
        "HF_HOME": str(cache.parent),
        "HF_HUB_CACHE": None,
        "MLX_SHIM_ALLOWED_MODELS": "some/allowed",
    }
    environ |= {} if guarded else {"MLX_SHIM_ANY_MODEL": "0"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        assert names(server.ready()) == [str(tiny.resolve())]
        for name in ("allowed", "other"):
            make_entry(cache / f"models--some--{name}")
        listed = set(names(server))
        if guarded:
            assert listed == {"some/allowed", str(tiny.resolve())}
        elif "some/other" not in listed:
            raise Inconclusive(f"stock lists {listed}")
