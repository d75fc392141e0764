"""Any client may have any model loaded: one on the server's disk, or downloaded from the hub.

With MLX_SHIM_ALLOWED_MODELS a request names one of those, or what the command line names, as its `model`, `draft_model`
or `adapters`, under whatever name of the same folder; else it is answered 404. /v1/models lists no others. Without the
setting all is as stock.
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
    """In the handler's thread: what is raised here is answered to this request alone."""
    named = model_names.described(args, kwargs)
    if named is not None:
        line = anatomy.arguments_of(anatomy.provider_of(instance))
        _check("model", named.model, model_names.DEFAULT, line.model)
        _check("draft_model", named.draft, model_names.DEFAULT, line.draft_model)
        _check("adapters", named.adapter, line.adapter_path)
    return wrapped(*args, **kwargs)


def _check(param: str, name: Any, *always: str | None) -> None:
    """Raise a 404 unless `name` is allowed. What is no name at all names no model: others answer that."""
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
    """What stock lists at /v1/models, beside the model of the command line, which it adds."""
    found = wrapped(*args, **kwargs)
    known = (*settings.current.allowed_models, engine.model_name)
    return types.SimpleNamespace(
        repos=frozenset(repo for repo in found.repos if repo.repo_id in known)
    )
