"""A request that names a model which cannot be loaded makes all clients lose the loaded model.

Stock drains the batch, drops the loaded model, and only then tries to load the model that was
named. After a typing error the next request waits until the model is loaded again. Here the
handler's thread checks the files of the named model, and downloads it, before the request is
queued.

Where the load fails all the same, the guard loads the former model again before the next request.
It does not do so where several machines share a model: the load may have failed differently on
each.
"""

from __future__ import annotations

import gc
import inspect
import os
import traceback
from types import SimpleNamespace
from typing import Any

from ..core import errors, patch, report
from ..core.errors import ShimError
from ..core.verdicts import Incompatible, Retired, require
from ..engine import anatomy
from ..engine.state import engine
from ..models import model_files, model_names

UPSTREAM = "no issue known; mlx-examples 887 was an earlier form"
MODULE = "mlx_lm.server"


class _Dropped(Exception):
    """The probe raises it where stock drops the model, before anything has been loaded."""


def _drop() -> None:
    raise _Dropped


def probe(server: Any) -> None:
    require(
        server,
        "ResponseGenerator.generate(request, generation_args)",
        "ModelProvider._load",
        "ModelDescription",
        "ModelProvider.load(model_path, adapter_path, draft_model_path)",
        "load",
    )
    provider = object.__new__(server.ModelProvider)
    provider.model_key = former = ("a model", None, None)
    provider.is_distributed = False
    provider.cli_args = SimpleNamespace(trust_remote_code=False, use_default_chat_template=False)
    provider._tokenizer_config = {}
    # From 0.32 on stock goes on to ask MLX after the reset, which an import should not do.
    provider.reset = _drop
    # Stock's own function, without the wrappers of other guards.
    load = inspect.unwrap(server.ModelProvider._load)
    try:
        load(provider, os.devnull)
    except _Dropped:
        return
    # Stock tried to open /dev/null/config.json.
    except (OSError, ValueError):
        if provider.model_key == former:
            raise Retired("a load that fails leaves the loaded model") from None
    except Exception as error:
        raise Incompatible(
            f"ModelProvider._load fails otherwise than expected: {error!r}"
        ) from error


def apply(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator.generate", _Checking(server.ModelDescription))
    patch.wrap(server, "ModelProvider._load", _load)


class _Checking:
    """Wraps `generate`, in the handler's thread: an exception here fails this request alone."""

    def __init__(self, description: type) -> None:
        self.description = description

    def __call__(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        named = model_names.described(args, kwargs)
        if named is not None:
            self.check(anatomy.provider_of(instance), named)
        return wrapped(*args, **kwargs)

    def check(self, provider: Any, named: Any) -> None:
        for param, value, optional in (
            ("model", named.model, False),
            ("adapters", named.adapter, True),
            ("draft_model", named.draft, True),
        ):
            if not isinstance(value, (str, os.PathLike)) and not (optional and value is None):
                wanted = "a string or null" if optional else "a string"
                raise errors.invalid(
                    param, f"{param} must be {wanted}, not of type {type(value).__name__}"
                )
        key = model_names.resolve(provider, named)
        if key is None or key == provider.model_key:
            return
        if key[0] is None:
            told = "the server was started without --model: the request has to name one"
            raise ShimError(404, "model_not_found", told, param="model")
        if provider.model_key is None and key == model_names.default_key(
            provider, self.description
        ):
            # That model is being loaded, or no loaded model can be lost.
            return
        _check_files(provider, key)


def _check_files(provider: Any, key: model_names.Key) -> None:
    model, adapter, draft = key
    shared = provider.is_distributed
    if shared and (adapter is not None or draft is not None):
        param = "adapters" if adapter is not None else "draft_model"
        raise errors.invalid(param, f"{param} cannot be used where several machines share a model")
    trusted = model_files.runs_code(provider, draft=False)
    model_files.check_model("model", model, trusted=trusted, shards=shared)
    if adapter is not None:
        model_files.check_adapter(adapter)
    if draft is not None:
        trusted = model_files.runs_code(provider, draft=True)
        model_files.check_model("draft_model", draft, trusted=trusted, shards=False)


def _load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """In the generation thread; stock gives an exception to the request that named the model."""
    former = instance.model_key
    try:
        return wrapped(*args, **kwargs)
    except Exception as error:
        dropped = former is not None and instance.model_key != former
        if dropped and not instance.is_distributed and not engine.stopping:
            _restore(instance, former, error)
        raise


def _restore(provider: Any, former: model_names.Key, error: BaseException) -> None:
    """Load the former model again.

    Where that fails too, no model is loaded, as with stock; a later request may load one.
    """
    _release(error)
    # 0.32 leaves it set, and then fails, where only the processor cannot be made.
    provider.model_key = None
    name = model_names.quote_name(former[0])
    try:
        # With all wrappers, so that the engine sees this load.
        provider._load(*former)
    except Exception as again:
        _release(again)
        report.line(f"the model {name} could not be loaded again, no model is loaded: {again!r}")
    else:
        report.line(f"the model {name} is loaded again: what a request named could not be")


def _release(error: BaseException | None) -> None:
    """Free the weights that the frames of a failed load hold: two models may not fit."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
