"""Tells from the files whether stock can load a model or an adapter; no weights are read.

It refuses only what makes stock fail for certain. Other models may still fail when stock loads
them.
"""

from __future__ import annotations

import glob
import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from ..core import errors, report
from ..core.errors import ShimError
from .model_names import is_missing, quote_name

# Stock opens every file with such a suffix. It would wait without end to open a pipe, or to read
# /dev/zero.
_OPENED_SUFFIXES = (
    ".json",
    ".safetensors",
    ".py",
    ".txt",
    ".model",
    ".tiktoken",
    ".jinja",
    ".jsonl",
)
_MAX_CONFIG_BYTES = 16 * 1024 * 1024


def check_model(param: str, name: str, *, trusted: bool, shards: bool) -> None:
    """Raise a ShimError unless stock is likely to load the model `name`.

    The model is downloaded if it has to be. `trusted`: stock would run code from the folder.
    `shards`: each machine loads a part of the model, which stock downloads later, when it knows
    which part.
    """
    folder = _folder_of(param, name, ["*.json"] if shards else None)
    _refuse(param, name, lambda: _why_no_model(folder, trusted=trusted, shards=shards))


def check_adapter(name: str) -> None:
    """Raise a ShimError unless stock is likely to load the adapter in the folder `name`."""
    param = "adapters"
    if not _exists(param, name):
        raise ShimError(
            404,
            "model_not_found",
            f"{param} {quote_name(name)} does not exist: no such folder",
            param=param,
        )
    _refuse(param, name, lambda: _why_no_adapter(Path(name)))


def runs_code(provider: Any, *, draft: bool) -> bool:
    """Whether stock runs a model's own code (`model_file`).

    A release without --trust-remote-code always does. The others never do so for a draft model.
    """
    utils = importlib.import_module("mlx_lm.utils")
    asks = "trust_remote_code" in inspect.signature(utils.load).parameters
    return not asks or (bool(provider.cli_args.trust_remote_code) and not draft)


def _refuse(param: str, name: str, why_not: Any) -> None:
    try:
        reason = why_not()
    except Exception as error:
        # Stock would fail in the same way.
        reason = f"{type(error).__name__}: {report.one_line(error, 200)}"
    if reason:
        raise errors.invalid(param, f"{param} {quote_name(name)} cannot be loaded: {reason}")


def _exists(param: str, name: str) -> bool:
    """Whether the path exists, by stock's test. Raises ShimError if the system cannot tell."""
    try:
        return Path(name).exists()
    except OSError as error:
        raise ShimError(
            404,
            "model_not_found",
            f"{param} {quote_name(name)} cannot be looked up: {error.strerror}",
            param=param,
        ) from error


def _folder_of(param: str, name: str, patterns: list[str] | None) -> Path:
    if _exists(param, name):
        return Path(name)
    utils = importlib.import_module("mlx_lm.utils")
    try:
        return Path(utils._download(name, allow_patterns=patterns))
    except Exception as error:
        what = report.one_line(error, 200)
        if is_missing(error):
            told = (
                f"{param} {quote_name(name)} does not exist: no folder here has that name, "
                f"and the hub says: {what}"
            )
            raise ShimError(404, "model_not_found", told, param=param) from error
        told = f"{param} {quote_name(name)} could not be downloaded: {type(error).__name__}: {what}"
        raise ShimError(500, "model_load_failed", told, param=param) from error


def _why_no_model(folder: Path, *, trusted: bool, shards: bool) -> str:
    if not folder.is_dir():
        return "it is not a folder"
    reason = _why_no_json(folder / "config.json") or _odd_file(folder)
    if reason:
        return reason
    utils = importlib.import_module("mlx_lm.utils")
    config = utils.load_config(folder)
    reason = _why_no_class(utils, folder, config, trusted)
    if reason or shards:
        return reason
    # Stock looks for them in this way.
    weights = glob.glob(str(folder / "model*.safetensors"))  # noqa: PTH207
    if not weights:
        return "the folder has no model*.safetensors"
    names = [path.name for path in folder.iterdir()]
    if not any(
        "token" in name or name.startswith("vocab") or name.endswith(".model") for name in names
    ):
        return "the folder has no file of a tokenizer"
    return next((why for why in map(why_no_tensors, map(Path, sorted(weights))) if why), "")


def _why_no_class(utils: Any, folder: Path, config: dict[str, Any], trusted: bool) -> str:
    file = config.get("model_file")
    if file is not None:
        if not trusted:
            return (
                f"its code ({quote_name(file)}) would have to be run, "
                "which is off (--trust-remote-code)"
            )
        return "" if (folder / file).is_file() else f"the folder has no {quote_name(file)}"
    if "model_type" not in config:
        return "config.json has no model_type"
    _, model_args = utils._get_classes(config=config)
    # This raises if an entry without a default is missing.
    model_args.from_dict(config)
    return ""


def _why_no_adapter(folder: Path) -> str:
    if not folder.is_dir():
        return "it is not a folder"
    reason = _why_no_json(folder / "adapter_config.json")
    if reason:
        return reason
    config = json.loads((folder / "adapter_config.json").read_text())
    wanted = [] if config.get("fine_tune_type") == "full" else ["num_layers", "lora_parameters"]
    missing = [name for name in wanted if name not in config]
    if missing:
        return f"adapter_config.json has no {' and no '.join(missing)}"
    return why_no_tensors(folder / "adapters.safetensors")


def _why_no_json(path: Path) -> str:
    """Why `path` is not a file with a JSON object."""
    if not path.exists():
        return f"the folder has no {path.name}"
    if not path.is_file():
        return f"{path.name} is not a regular file"
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        return f"{path.name} is larger than {_MAX_CONFIG_BYTES >> 20} MiB"
    try:
        parsed = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        return f"{path.name} cannot be parsed: {report.one_line(error, 100)}"
    return "" if isinstance(parsed, dict) else f"{path.name} is not a JSON object"


def _odd_file(folder: Path) -> str:
    """Why the folder cannot be read: a pipe, a socket or a device where stock expects a file."""
    for entry in os.scandir(folder):
        opened = entry.name.endswith(_OPENED_SUFFIXES)
        odd = opened and not entry.is_file() and not entry.is_dir()
        # For a link without a target stock sees no file either.
        if odd and Path(entry.path).exists():
            return f"{entry.name} is not a regular file"
    return ""


def why_no_tensors(path: Path) -> str:
    """Why a safetensors file cannot be read.

    Its header shows a copy that was cut short, or a pointer of git-lfs.
    """
    if not path.is_file():
        return f"the folder has no file {path.name}"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            return f"{path.name} is cut short, or is not in the format safetensors"
        header = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return f"{path.name} is cut short" if 8 + length + max(ends, default=0) > size else ""
