"""Any client can make the server load any model: one from its disk, or one downloaded from the hub.

With MLX_SHIM_ALLOWED_MODELS a request may name only the models listed there and those of the
command line, as its `model`, `draft_model` or `adapters`. Another name of the same folder is
accepted too. A request that names anything else gets 404, and /v1/models lists only allowed
models. Without the setting the server behaves as stock.
"""

from __future__ import annotations

import types
from typing import Any

from ..core import patch, settings
from ..core.errors import ShimError
from ..core.verdicts import require
from ..engine import anatomy
from ..engine.state import engine
from ..models import model_names

UPSTREAM = "mlx-lm 1892, 1893, 152"
MODULE = "mlx_lm.server"
SETTINGS = ("allowed_models",)


def probe(server: Any) -> None:
    require(server, "ResponseGenerator.generate(request, generation_args)", "scan_cache_dir")


def apply(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator.generate", _generate)
    patch.wrap(server, "scan_cache_dir", _scan_cache_dir)


def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Check the names in the handler's thread: an exception here fails this request alone."""
    named = model_names.described(args, kwargs)
    if named is not None:
        line = anatomy.arguments_of(anatomy.provider_of(instance))
        _check("model", named.model, model_names.DEFAULT, line.model)
        _check("draft_model", named.draft, model_names.DEFAULT, line.draft_model)
        _check("adapters", named.adapter, line.adapter_path)
    return wrapped(*args, **kwargs)


def _check(param: str, name: Any, *always: str | None) -> None:
    """Raise a 404 unless `name` is allowed. Other guards refuse a name that is not a string."""
    if not isinstance(name, str):
        return
    allowed = [known for known in (*always, *settings.current.allowed_models) if known is not None]
    if name in allowed:
        return
    hub = param != "adapters"
    stands_for = model_names.identity(name, hub=hub)
    if stands_for not in [
        model_names.identity(known, hub=hub) for known in allowed if known != model_names.DEFAULT
    ]:
        told = f"{param} {model_names.quote_name(name)} is not among the models of this server"
        raise ShimError(404, "model_not_found", told, param=param)


def _scan_cache_dir(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Give stock only allowed models to list at /v1/models."""
    found = wrapped(*args, **kwargs)
    known = (*settings.current.allowed_models, engine.model_name)
    return types.SimpleNamespace(
        repos=frozenset(repo for repo in found.repos if repo.repo_id in known)
    )
