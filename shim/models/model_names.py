"""What the `model`, `adapters` and `draft_model` of a request stand for, told without loading anything."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from ..core import report

# (model, adapter, draft), what stock calls the model_key; each is a name, or None for none.
Key = tuple[Any, Any, Any]
DEFAULT = "default_model"
# What Hugging Face's hub and the file system raise for a model that is not there, by name: the hub may be absent.
_NO_SUCH_MODEL = {
    "FileNotFoundError", "NotADirectoryError", "HFValidationError", "RepositoryNotFoundError", "LocalEntryNotFoundError",
    "RevisionNotFoundError", "EntryNotFoundError", "GatedRepoError", "OfflineModeIsEnabled",
}  # fmt: skip


def key_of(args: Any, kwargs: Any) -> Key:
    """The key that `ModelProvider._load` is asked to load, from its arguments."""
    names = ("model_path", "adapter_path", "draft_model_path")
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get(names[0]), given.get(names[1]), given.get(names[2])


def is_missing(error: BaseException) -> bool:
    """Whether `error` says that a model does not exist, rather than that it cannot be loaded."""
    return any(kind.__name__ in _NO_SUCH_MODEL for kind in type(error).__mro__)


def quote_name(name: object) -> str:
    """A name as a client is told of it: quoted, on one line, cut short where it is long."""
    text = str(name)
    return repr(text if len(text) <= 100 else text[:99] + "…")  # noqa: PLR2004


def described(args: Any, kwargs: Any) -> Any:
    """The ModelDescription in the arguments of `ResponseGenerator.generate`, or None."""
    arguments = args[1] if len(args) > 1 else kwargs.get("generation_args")
    return getattr(arguments, "model", None)


def resolve(provider: Any, description: Any) -> Key | None:
    """The key that stock's `load` comes to for a ModelDescription, or None where that cannot be told.

    Stock's own `load` is asked, since how the defaults apply differs between releases. It is called on an object that
    has what it looks at, and whose `_load` only notes what it is to load.
    """
    asked = object.__new__(type(provider))
    noted: list[Key] = []
    try:
        for name in ("cli_args", "_model_map", "_adapter_map", "_draft_model_map"):
            setattr(asked, name, getattr(provider, name))
        asked.model_key = asked  # equal to no key
        asked.model = asked.tokenizer = None
        asked._load = lambda model, adapter=None, draft=None: noted.append((model, adapter, draft))
        type(provider).load(asked, description.model, description.adapter, description.draft)
    except Exception as error:  # a program's own ModelProvider may look at more
        report.debug(f"what a request names cannot be told: {error!r}")
        return None
    return noted[0] if noted else None


def default_key(provider: Any, description: type) -> Key | None:
    """The key of what the command line names; `description` is the class ModelDescription."""
    return resolve(provider, description(model=DEFAULT, draft=DEFAULT, adapter=None))


def identity(name: Any, *, hub: bool = True) -> Any:
    """What a name stands for now: (real path, device, inode) of its folder, be it in the hub's cache; else the name.

    The inode is part of it because a path may be given to another folder, and the path because an inode may.
    """
    if name is None:
        return None
    try:
        folder = name if Path(name).exists() else (_snapshot(name) if hub else name)
        real = os.path.realpath(folder)
        found = os.stat(real)  # noqa: PTH116
    except Exception:  # there is no such folder; what the hub raises has no common base
        return name
    return real, found.st_dev, found.st_ino


def identities(key: Key) -> Key:
    """Equal for two keys that name the same model, adapter and draft now. An adapter is never looked for in the hub."""
    model, adapter, draft = key
    return identity(model), identity(adapter, hub=False), identity(draft)


def _snapshot(name: str) -> str:
    """The folder of a model in the hub's cache, asking nobody. Raises what the hub raises where there is none."""
    utils = importlib.import_module("mlx_lm.utils")
    return str(utils.snapshot_download(name, local_files_only=True, allow_patterns=["config.json"]))
