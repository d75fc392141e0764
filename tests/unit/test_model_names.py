"""Which model a request names: told from the files as they are now, by stock's own rules."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import mlx_lm.utils
import pytest
from mlx_lm.server import ModelDescription, ModelProvider

from shim.cli import tiny_model
from shim.core.errors import ShimError
from shim.engine import queues
from shim.guards import dropped_model, needless_reload, stall
from shim.models import model_files, model_names


@pytest.fixture
def provider():
    """Stock's provider, with nothing loaded."""
    made = object.__new__(ModelProvider)
    made.cli_args = SimpleNamespace(
        model="served", adapter_path="an adapter", draft_model=None, trust_remote_code=False
    )
    made._model_map = {"default_model": "served"}
    made._adapter_map = {"default_model": "an adapter"}
    made._draft_model_map = {"default_model": None}
    made.model_key = None
    made.is_distributed = False
    return made


def described(model="default_model", draft="default_model", adapter=None):
    return ModelDescription(model=model, draft=draft, adapter=adapter)


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [
        (("m",), {}, ("m", None, None)),
        (("m", "a", "d"), {}, ("m", "a", "d")),
        (("m",), {"draft_model_path": "d"}, ("m", None, "d")),
        ((), {"draft_model_path": "d", "model_path": "m"}, ("m", None, "d")),
    ],
)
def test_what_is_loaded_is_told_from_the_arguments(args, kwargs, key):
    assert model_names.key_of(args, kwargs) == key


def test_defaults_are_stocks(provider):
    """The default model always has the command line's adapter.

    The same model, named by its path, has none unless the request names one.
    """
    default = ("served", "an adapter", None)
    assert model_names.default_key(provider, ModelDescription) == default
    assert model_names.resolve(provider, described(adapter="ignored")) == default
    assert model_names.resolve(provider, described("served")) == ("served", None, None)
    rename = needless_reload._Naming(ModelDescription).rename
    assert rename(provider, described(adapter="ignored")) == described()
    assert rename(provider, described("served", None, "an adapter")) == described()
    assert rename(provider, described("served")) == ModelDescription(
        model="served", draft=None, adapter=None
    )
    assert rename(provider, described(["a list"])) == described(["a list"]), "stock must refuse it"


def test_a_link_with_a_new_target_is_another_model(provider, tmp_path, monkeypatch):
    """A model that was loaded under a name keeps it, and no other model gets it."""
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    for folder in (old, new):
        folder.mkdir()
    link.symlink_to(old)
    provider._model_map["default_model"] = str(link)
    provider._adapter_map["default_model"] = None
    rename = needless_reload._Naming(ModelDescription).rename
    needless_reload._load(lambda *key: None, provider, (str(link), None, None), {})
    assert rename(provider, described(f"{old}/")) == described()
    assert rename(provider, described(str(new))).model == str(new)
    link.unlink()
    link.symlink_to(new)
    assert rename(provider, described(f"{old}/")) == described(), "it is loaded"
    assert rename(provider, described(str(new))).model == str(new), "it is not"
    assert rename(provider, described(str(link))) == described(), "like stock: the name is loaded"
    old.rename(tmp_path / "away")
    old.mkdir()
    assert rename(provider, described(str(old))).model == str(old), "the path is another folder now"


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 500, "model_load_failed"),
        (FileNotFoundError("no such repository"), 404, "model_not_found"),
    ],
)
def test_a_download_that_fails(provider, monkeypatch, raised, status, code):
    def download(*args, **kwargs):
        raise raised

    monkeypatch.setattr(mlx_lm.utils, "_download", download)
    with pytest.raises(ShimError) as told:
        dropped_model._Checking(ModelDescription).check(provider, described("org/name"))
    assert (told.value.status, told.value.code, told.value.param) == (status, code, "model")


def test_several_machines(provider, tmp_path):
    provider.is_distributed = True
    folder = str(tiny_model.make(tmp_path / "model"))
    check = dropped_model._Checking(ModelDescription).check
    check(provider, described(folder))
    for named, param in (
        (described(folder, None, folder), "adapters"),
        (described(folder, folder), "draft_model"),
    ):
        with pytest.raises(ShimError) as told:
            check(provider, named)
        assert (told.value.status, told.value.param) == (400, param)


def test_without_a_model_of_its_own(provider):
    provider._model_map["default_model"] = provider._adapter_map["default_model"] = None
    with pytest.raises(ShimError, match="without --model") as told:
        dropped_model._Checking(ModelDescription).check(provider, described())
    assert told.value.status == 404


def test_a_good_model_is_let_pass(tmp_path):
    folder = tiny_model.make(tmp_path / "model")
    model_files.check_model("model", str(folder), trusted=False, shards=False)


def test_a_handler_that_downloads_is_no_stall(engine, request_, monkeypatch):
    """Not while it downloads, and not right after, when the engine has had no time yet."""
    monkeypatch.setattr(stall, "_stalled", lambda entry, why: pytest.fail(why))
    entry = engine.open((object(),), object())
    for engine.clock in (2000.0, 2002.0):
        stall._check()
    queues.ResponseQueue(entry, object)
    for engine.clock in (2002.0, 2004.0):
        stall._check()
