"""The same model under another name empties the batch and loads the model again.

Stock compares names: beside requests for `default_model`, one that gives the model's path, or its name in the hub,
waits until all others are done, and then for the model to be loaded again. Here a name is exchanged, before the request
is queued, for the one under which the same folder was loaded. What a request gets, and the `model` in its answer, stay
the same.
"""

from __future__ import annotations

from typing import Any

from ..core import patch, report
from ..core.verdicts import Retired, require
from ..engine import anatomy
from ..models import model_names

UPSTREAM = "mlx-lm 98, settled for the very name that --model gives"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(
        server, "ResponseGenerator.generate(request, generation_args)", "ModelDescription",
        "ModelProvider.load(model_path, adapter_path, draft_model_path)",
        "ModelProvider._load(model_path, adapter_path, draft_model_path)",
    )  # fmt: skip
    here, there = (
        server.ModelDescription(model=name, draft=None, adapter=None) for name in ("/", "/.")
    )
    if here == there:
        raise Retired("names of one folder are equal")


def apply(server: Any) -> None:
    patch.wrap(server, "ModelProvider._load", _load)
    patch.wrap(server, "ResponseGenerator.generate", _Naming(server.ModelDescription))


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Note what the names stand for when they are loaded: a link may be given another target later."""
    key = model_names.key_of(args, kwargs)
    _note(instance, key)
    result = wrapped(*args, **kwargs)
    if any(
        isinstance(name, str) for name in instance._shim_loaded[1]
    ):  # it has been downloaded meanwhile
        _note(instance, key)
    return result


def _note(provider: Any, key: model_names.Key) -> None:
    try:
        stands_for = model_names.identities(key)
    except Exception as error:
        report.line(f"what was loaded cannot be told from other names of it: {error!r}")
        stands_for = key
    provider._shim_loaded = (key, stands_for)


class _Naming:
    """Around `generate`, in the handler's thread."""

    def __init__(self, description: type) -> None:
        self.description = description

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        named = model_names.described(args, kwargs)
        if named is not None:
            arguments = args[1] if len(args) > 1 else kwargs["generation_args"]
            try:
                arguments.model = self.rename(anatomy.provider_of(instance), named)
            except Exception as error:  # stock then does with it what it does
                report.debug(f"a model's name is left as it is: {error!r}")
        return wrapped(*args, **kwargs)

    def rename(self, provider: Any, named: Any) -> Any:
        """A description that stock resolves to the same model, spelled as the others in the batch are."""
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
        """`key`, or what is loaded, or the default, where that names the same."""
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
