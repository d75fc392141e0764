"""Which models and adapters a request names by `model`, `adapters` and `draft_model`.

Nothing is loaded to find that out.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from ..core import report

# (model, adapter, draft), which stock calls the model_key; each is a name, or None.
Key = tuple[Any, Any, Any]
DEFAULT = "default_model"
# The exceptions of Hugging Face's hub and of the file system for a model that does not exist. By
# name, since the package of the hub may be absent.
_NO_SUCH_MODEL = {
    "FileNotFoundError",
    "NotADirectoryError",
    "HFValidationError",
    "RepositoryNotFoundError",
    "LocalEntryNotFoundError",
    "RevisionNotFoundError",
    "EntryNotFoundError",
    "GatedRepoError",
    "OfflineModeIsEnabled",
}


def key_of(args: Any, kwargs: Any) -> Key:
    """The key that `ModelProvider._load` is asked to load, from its arguments."""
    names = ("model_path", "adapter_path", "draft_model_path")
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get(names[0]), given.get(names[1]), given.get(names[2])


def is_missing(error: BaseException) -> bool:
    """Whether `error` says that a model does not exist, and not that it cannot be loaded."""
    return any(kind.__name__ in _NO_SUCH_MODEL for kind in type(error).__mro__)


def quote_name(name: object) -> str:
    """A name for a message to a client: quoted, on one line, and cut short if it is long."""
    text = str(name)
    return repr(text if len(text) <= 100 else text[:99] + "…")  # noqa: PLR2004


def described(args: Any, kwargs: Any) -> Any:
    """The ModelDescription in the arguments of `ResponseGenerator.generate`, or None."""
    arguments = args[1] if len(args) > 1 else kwargs.get("generation_args")
    return getattr(arguments, "model", None)


def resolve(provider: Any, description: Any) -> Key | None:
    """The key that stock's `load` makes of a ModelDescription, or None if that is not known.

    It calls stock's own `load`, since releases differ in how they apply the defaults. `load` gets
    an object with the attributes that it reads, and with a `_load` that only notes its arguments.
    """
    asked = object.__new__(type(provider))
    noted: list[Key] = []
    # This can fail, since a program's own ModelProvider may read more attributes.
    with report.contained("the models that a request names are not known", report.debug):
        for name in ("cli_args", "_model_map", "_adapter_map", "_draft_model_map"):
            setattr(asked, name, getattr(provider, name))
        # No key is equal to this one.
        asked.model_key = asked
        asked.model = asked.tokenizer = None
        asked._load = lambda model, adapter=None, draft=None: noted.append((model, adapter, draft))
        type(provider).load(asked, description.model, description.adapter, description.draft)
        return noted[0] if noted else None
    return None


def default_key(provider: Any, description: type) -> Key | None:
    """The key of the models on the command line; `description` is the class ModelDescription."""
    return resolve(provider, description(model=DEFAULT, draft=DEFAULT, adapter=None))


def identity(name: Any, *, hub: bool = True) -> Any:
    """(real path, device, inode) of the folder that a name means now; the name if there is none.

    The folder may be in the hub's cache. Both path and inode are needed, since another folder may
    get the same path or the same inode later.
    """
    if name is None:
        return None
    try:
        folder = name if Path(name).exists() else (_snapshot(name) if hub else name)
        real = os.path.realpath(folder)
        found = os.stat(real)  # noqa: PTH116
    except Exception:
        # There is no such folder. The exceptions of the hub have no common base.
        return name
    return real, found.st_dev, found.st_ino


def identities(key: Key) -> Key:
    """Equal for two keys that name the same model, adapter and draft now.

    An adapter is never looked for in the hub.
    """
    model, adapter, draft = key
    return identity(model), identity(adapter, hub=False), identity(draft)


def _snapshot(name: str) -> str:
    """The folder of a model in the hub's cache, without network. Raises if there is none."""
    utils = importlib.import_module("mlx_lm.utils")
    return str(utils.snapshot_download(name, local_files_only=True, allow_patterns=["config.json"]))
