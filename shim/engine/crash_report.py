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

from .. import __version__
from ..core import report, settings
from .state import engine

KEPT = 20  # the newest so many reports stay
_NAME = "mlx-lm-shim-"
RUN = 10  # characters in a row that a message may not share with a request
_LOOKED_AT = 200_000  # characters of each text of a request


def facts(reason: str, error: BaseException | None) -> dict[str, Any]:
    """What only the living engine knows: the requests as they are now, and the reason without anything of theirs."""
    known = engine.known()
    theirs = [
        text
        for entry in known
        for text in _texts(getattr(entry.request, "__dict__", entry.request))
    ]
    return {
        "reason": _without(theirs, reason),
        "exception": f"{type(error).__name__}: {_without(theirs, error)}" if error else None,
        "in_flight": engine.in_flight,
        "counters": dict(engine.counters),
        "deliveries": engine.deliveries,
        "since_delivery_s": round(engine.clock - engine.delivered, 3),
        "requests": [entry.describe(engine.clock) for entry in known],
    }


def write(status: int, error: BaseException | None, known: dict[str, Any]) -> None:
    """Write the report whole or not at all, readable by its owner only. Raises OSError."""
    folder = Path(settings.current.report_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(known | _content(status, error), indent=1)
    handle, scratch = tempfile.mkstemp(prefix=".", dir=folder)  # made with mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        os.rename(scratch, folder / f"{_NAME}{stamp}-{os.getpid()}-{time.monotonic_ns()}.json")
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
    for old in sorted(folder.glob(f"{_NAME}*.json"), key=lambda p: p.stat().st_mtime_ns)[:-KEPT]:
        old.unlink(missing_ok=True)


def stack(thread_id: int | None) -> list[str]:
    """A thread's frames, outermost first, as "file:line function"."""
    frame = sys._current_frames().get(thread_id or 0)
    return (
        [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)]
        if frame
        else []
    )


def _content(status: int, error: BaseException | None) -> dict[str, Any]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
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
        "traceback": traceback.format_list(traceback.extract_tb(error.__traceback__))
        if error
        else [],
        "memory": _memory(),
        "threads": {names.get(ident, str(ident)): stack(ident) for ident in sys._current_frames()},
    }


def _without(theirs: list[str], message: object) -> str:
    """`message` on one line, or that it is withheld: it shares a run of characters with what a request brought."""
    flat = report.one_line(message)
    runs = {flat[i : i + RUN] for i in range(len(flat) - RUN + 1)}
    for text in theirs:
        short = " ".join(text[:_LOOKED_AT].split())
        if (len(short) < RUN and short in flat) or any(run in short for run in runs):
            return "[withheld: it quotes a request; the log has it]"
    return flat


def _texts(value: Any) -> list[str]:
    """Every string of some length within a request."""
    if isinstance(value, str):
        return [value] if len(value) > 3 else []  # noqa: PLR2004
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [text for item in value for text in _texts(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def _memory() -> dict[str, int]:
    """Bytes: the process's peak, and what MLX counts. Asking MLX takes none of its locks."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    figures = {"peak_resident": peak}
    mx = sys.modules.get("mlx.core")
    if mx is not None:
        figures |= {"mlx_active": mx.get_active_memory(), "mlx_cache": mx.get_cache_memory()}
        figures["mlx_peak"] = mx.get_peak_memory()
    return figures
