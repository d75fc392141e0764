"""Where a model is on this machine, how large, and of which type.

It downloads nothing and does not import mlx.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.report import one_line
from ..models.model_files import why_no_tensors

# The types of safetensors, and their names in config.json and mlx.
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Bytes. safetensors has the same limit.
_LONGEST_HEADER = 100 << 20

ACCEPTED = "accepted: a folder with a model, or a Hugging Face repo that is in the local cache"


class NotHere(Exception):
    """The model cannot be served from here. The message says why, in one line, without its name."""


def find(name: str, environ: Mapping[str, str]) -> Path:
    """The folder of a model: `name` itself, or a hub repo in the local cache. Raises NotHere."""
    try:
        folder = Path(name).expanduser() if name else None
        found = folder if folder and folder.exists() else in_cache(name, environ)
        described = found is not None and (found / "config.json").is_file()
    except PermissionError:
        raise NotHere("it is closed to this user") from None
    # A name that is too long, has a NUL, or has a ~ with a user that does not exist.
    except (OSError, ValueError, RuntimeError):
        found = None
    if found is None:
        raise NotHere("neither a folder that is there nor in the cache of the hub")
    if not described:
        raise NotHere("it has no config.json")
    return found


def in_cache(name: str, environ: Mapping[str, str]) -> Path | None:
    """The snapshot that `main` names of a repo in the hub's cache, or another if it is missing."""
    home = (
        environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repo = hub / f"models--{name.replace('/', '--')}"
    try:
        main = (repo / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        main = ""
    found = sorted(config.parent for config in (repo / "snapshots").glob("*/config.json"))
    return next((folder for folder in found if folder.name == main), found[-1] if found else None)


def config(folder: Path) -> dict[str, Any]:
    """Read its config.json. Raises NotHere."""
    try:
        parsed = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise NotHere(f"its config.json cannot be read: {one_line(error, 100)}") from None
    if not isinstance(parsed, dict):
        raise NotHere("its config.json is not a JSON object")
    return parsed


def weights(folder: Path) -> list[Path]:
    """The files that stock loads. Raises NotHere where one is missing or cut short."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise NotHere("it has no model*.safetensors")
    try:
        missing = _named(folder / "model.safetensors.index.json") - {file.name for file in files}
        why = f"{len(missing)} of its weight files are not there" if missing else ""
        why = why or next((why for why in map(why_no_tensors, files) if why), "")
    # The file is not JSON, or not the JSON that it should be.
    except Exception as error:
        why = f"its weights cannot be read: {type(error).__name__}: {one_line(error, 100)}"
    if why:
        raise NotHere(why)
    return files


def size(folder: Path) -> int:
    """Bytes of its weights. Raises NotHere."""
    return sum(file.stat().st_size for file in weights(folder))


def dtype(folder: Path, described: Mapping[str, Any]) -> str:
    """The type of its unpacked weights, which is the type of its caches; float32 if unknown.

    It is read from the weights where they are here, else from config.json.
    """
    for file in sorted(folder.glob("model*.safetensors"))[:1]:
        with file.open("rb") as opened:
            header = json.loads(
                opened.read(min(int.from_bytes(opened.read(8), "little"), _LONGEST_HEADER))
            )
        kinds = Counter(
            tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"
        )
        floats = [_FLOATS[kind] for kind, _ in kinds.most_common() if kind in _FLOATS]
        if floats:
            return floats[0]
    for entry in ("dtype", "torch_dtype"):
        if of_text(described, entry) in _FLOATS.values():
            return str(of_text(described, entry))
    return "float32"


def longest(described: Mapping[str, Any]) -> int | None:
    """The longest context the model was made for, in tokens, if config.json says."""
    found = of_text(described, "max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def of_text(described: Mapping[str, Any], entry: str) -> Any:
    """An entry of config.json. A vision model keeps those of its language model in text_config."""
    inner = described.get("text_config")
    return described.get(entry) or (inner.get(entry) if isinstance(inner, dict) else None)


def _named(index: Path) -> set[str]:
    return set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else set()
