"""A crash report: one JSON file in MLX_SHIM_REPORT_DIR for each death or stall. It holds no prompt and no completion."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from . import __version__, report, settings
from .engine import engine

KEPT = 20  # the newest so many reports stay
_NAME = "mlx-lm-shim-"


def ledger_facts() -> dict[str, Any]:
    """The requests and counters as they are now."""
    return {
        "in_flight": engine.in_flight,
        "counters": dict(engine.counters),
        "deliveries": engine.deliveries,
        "since_delivery_s": round(engine.clock - engine.delivered, 3),
        "requests": [entry.describe(engine.clock) for entry in list(engine.entries.values())],
    }


def write(status: int, reason: str, error: BaseException | None, facts: dict[str, Any]) -> None:
    """Write the report whole or not at all, readable by its owner only. Raises OSError."""
    folder = Path(settings.current.report_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_content(status, reason, error) | facts, indent=1)
    handle, scratch = tempfile.mkstemp(prefix=".", dir=folder)  # made with mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(text)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    os.rename(scratch, folder / f"{_NAME}{stamp}-{os.getpid()}-{time.monotonic_ns()}.json")
    for old in sorted(folder.glob(f"{_NAME}*.json"), key=lambda p: p.stat().st_mtime_ns)[:-KEPT]:
        old.unlink(missing_ok=True)


def stack(thread_id: int | None) -> list[str]:
    """A thread's frames, outermost first, as "file:line function"."""
    frame = sys._current_frames().get(thread_id or 0)
    return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)] if frame else []


def _content(status: int, reason: str, error: BaseException | None) -> dict[str, Any]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        "reason": _redact(report.one_line(reason)),
        "exit": status,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pid": os.getpid(),
        "uptime_s": round(engine.uptime, 3),
        "versions": {
            "shim": __version__,
            "mlx-lm": report.version_of("mlx-lm"),
            "mlx": report.version_of("mlx"),
            "python": sys.version.split()[0],
        },
        "guards": {name: str(state) for name, state in report.states.items()},
        "traceback": traceback.format_list(traceback.extract_tb(error.__traceback__)) if error else [],
        "exception": _redact(f"{type(error).__name__}: {report.one_line(error)}") if error else None,
        "memory": _memory(),
        "threads": {names.get(ident, str(ident)): stack(ident) for ident in sys._current_frames()},
    }


def _redact(text: str) -> str:
    """`text` without what requests in flight brought: an exception's message may quote it."""
    for entry in list(engine.entries.values()):
        for theirs in _texts(vars(entry.request) if hasattr(entry.request, "__dict__") else entry.request):
            text = text.replace(theirs, "[…]")
    return text


def _texts(value: Any) -> list[str]:
    """Every string of some length within a request."""
    if isinstance(value, str):
        return [value] if len(value) > 3 else []  # noqa: PLR2004
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in _texts(item)] if isinstance(value, (list, tuple)) else []


def _memory() -> dict[str, int]:
    """Bytes: the process's peak, and what MLX counts. Asking MLX takes none of its locks."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    figures = {"peak_resident": peak}
    mx = sys.modules.get("mlx.core")
    if mx is not None:
        figures |= {"mlx_active": mx.get_active_memory(), "mlx_cache": mx.get_cache_memory()}
        figures["mlx_peak"] = mx.get_peak_memory()
    return figures
