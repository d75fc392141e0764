"""How much memory a token takes in the caches of a model, told without loading its weights.

A child process builds the model from its config.json and puts one token through its caches. MLX is
lazy: the caches get their shapes and types, but no memory, as long as no code reads a value. The
child is there for models that do read one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ..core import report, settings
from ..models import kv_cost
from ..models.kv_cost import Cost, Layer

# Seconds for the child. The imports take most of them.
LIMIT = 60
# Bytes that MLX may allocate in the child.
MOST_MEMORY = 1 << 30
_WATCH_EVERY = 0.02  # seconds
_PROGRAM = """\
import sys
sys.path.insert(0, sys.argv[1])
from shim.planning import cache_cost
cache_cost.main(*sys.argv[2:])
"""


class NotKnown(Exception):
    """The cost cannot be told. The message says why, in one line."""


def ask(folder: Path, dtype: str) -> Cost:
    """Ask a child process for the cost of the model in `folder`, whose weights are `dtype`.

    Raises NotKnown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer"
        command = [
            sys.executable,
            "-c",
            _PROGRAM,
            str(Path(__file__).resolve().parents[2]),
            str(folder),
            dtype,
            str(answer),
        ]
        try:
            child = subprocess.run(
                command,
                env=os.environ | {settings.KILL_SWITCH: "0"},
                capture_output=True,
                check=False,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise NotKnown(f"it could not be built within {LIMIT} s") from None
        if child.returncode == -signal.SIGKILL:
            raise NotKnown("it computes something while it is built, so it was stopped")
        if child.returncode or not answer.exists():
            said = child.stderr.decode(errors="replace").strip().splitlines()
            raise NotKnown(said[-1][:200] if said else f"status {child.returncode}")
        told = json.loads(answer.read_text())
    if "why" in told:
        raise NotKnown(told["why"])
    return Cost(tuple(Layer(*layer) for layer in told["layers"]))


def main(folder: str, dtype: str, answer: str) -> None:
    """Write the cost into the file `answer`. Runs in the child."""
    threading.Thread(target=_watch, daemon=True).start()
    try:
        config = importlib.import_module("mlx_lm.utils").load_config(Path(folder))
        told: dict[str, Any] = {"layers": of(config, dtype).layers}
    except Exception as error:
        told = {
            "why": str(error)
            if isinstance(error, NotKnown)
            else f"{type(error).__name__}: {report.one_line(error, 200)}"
        }
    Path(answer).write_text(json.dumps(told))


def of(config: dict[str, Any], dtype: str) -> Cost:
    """Build the model from `config`, compute nothing, and tell its cost.

    Raises NotKnown, and whatever the model raises.
    """
    if config.get("model_file") is not None:
        raise NotKnown("it brings code of its own, which the shim does not run")
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    # The CPU: MLX then compiles no GPU kernel.
    mx.set_default_device(mx.cpu)
    model_class, arguments = _get_classes(config=config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    model.eval()
    cache = make_prompt_cache(model)
    model(mx.array([[0]]), cache=cache)
    cost = kv_cost.learn(cache)
    if not any(layer.per_token or layer.constant for layer in cost.layers):
        raise NotKnown("its caches are of a kind that does not tell")
    return cost


def _watch() -> None:
    """End the child once MLX takes memory: computing would take the memory of all weights."""
    mx = importlib.import_module("mlx.core")
    while mx.get_active_memory() < MOST_MEMORY:
        time.sleep(_WATCH_EVERY)
    os.kill(os.getpid(), signal.SIGKILL)
