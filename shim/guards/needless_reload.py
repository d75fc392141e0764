"""A request that gives the loaded model another name waits, and has the model loaded again.

Stock compares names. While it serves requests for `default_model`, a request that gives the model's
path, or its name in the hub, waits until all others are done, and then until the model is loaded
again. Here the shim replaces the name, before the request is queued, by the name under which the
same folder was loaded. The answer to a request, and the `model` in it, stay the same.
"""

from __future__ import annotations

from typing import Any

from ..core import patch, report
from ..core.verdicts import Retired, require
from ..engine import anatomy
from ..models import model_names

UPSTREAM = "mlx-lm 98, solved only for the exact name that --model gives"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(
        server,
        "ResponseGenerator.generate(request, generation_args)",
        "ModelDescription",
        "ModelProvider.load(model_path, adapter_path, draft_model_path)",
        "ModelProvider._load(model_path, adapter_path, draft_model_path)",
    )
    here, there = (
        server.ModelDescription(model=name, draft=None, adapter=None) for name in ("/", "/.")
    )
    if here == there:
        raise Retired("names of one folder are equal")


def apply(server: Any) -> None:
    patch.wrap(server, "ModelProvider._load", _load)
    patch.wrap(server, "ResponseGenerator.generate", _Naming(server.ModelDescription))


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note which folders the names mean now: a link may get another target later."""
    key = model_names.key_of(args, kwargs)
    _note(instance, key)
    result = wrapped(*args, **kwargs)
    # A name that was not a folder before has been downloaded meanwhile.
    if any(isinstance(name, str) for name in instance._shim_loaded[1]):
        _note(instance, key)
    return result


def _note(provider: Any, key: model_names.Key) -> None:
    stands_for = key
    with report.contained("other names of the loaded model are not recognised", report.line):
        stands_for = model_names.identities(key)
    provider._shim_loaded = (key, stands_for)


class _Naming:
    """The wrapper of `generate`; it runs in the handler's thread."""

    def __init__(self, description: type) -> None:
        self.description = description

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        named = model_names.described(args, kwargs)
        if named is not None:
            arguments = patch.given(wrapped, args, kwargs, "generation_args", 1)
            with report.contained("a model's name is left as it is", report.debug):
                arguments.model = self.rename(anatomy.provider_of(instance), named)
        return wrapped(*args, **kwargs)

    def rename(self, provider: Any, named: Any) -> Any:
        """A description that stock resolves to the same model, under the name that is in use."""
        key = model_names.resolve(provider, named)
        default = model_names.default_key(provider, self.description)
        if key is None:
            return named
        target = self.known_as(provider, key, default)
        if target == default:
            spelled = self.description(
                model=model_names.DEFAULT, draft=model_names.DEFAULT, adapter=None
            )
        else:
            spelled = self.description(model=target[0], draft=target[2], adapter=target[1])
        return spelled if model_names.resolve(provider, spelled) == target else named

    def known_as(
        self, provider: Any, key: model_names.Key, default: model_names.Key | None
    ) -> model_names.Key:
        """The key of what is loaded, or of the default, if it names the same; otherwise `key`."""
        noted: tuple[model_names.Key, model_names.Key] | None = getattr(
            provider, "_shim_loaded", None
        )
        loaded = noted and noted[0]
        if key in (loaded, default):
            return key
        stands_for = model_names.identities(key)
        if noted and stands_for == noted[1]:
            return noted[0]
        if (
            default is not None
            and default != loaded
            and stands_for == model_names.identities(default)
        ):
            return default
        return key
