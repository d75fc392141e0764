"""Writes a crash report, a JSON file in MLX_SHIM_REPORT_DIR, for each death or stall.

A report holds no prompt and no completion.
"""

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

# The newest reports stay, this many; older ones are deleted.
REPORTS_KEPT = 20
# A message is withheld if it shares this many characters in a row with a request.
QUOTE_LENGTH = 10
# Characters, of each text of a request, that a message is compared with.
_COMPARED_LENGTH = 200_000
_FILE_PREFIX = "mlx-lm-shim-"


def facts(reason: str, error: BaseException | None) -> dict[str, Any]:
    """Return what only the running engine knows: its requests as they are now, and the reason.

    The reason quotes no request.
    """
    known = engine.known()
    theirs = [
        text
        for entry in known
        for text in _texts(getattr(entry.request, "__dict__", entry.request))
    ]
    return {
        "reason": _withhold_quotes(theirs, reason),
        "exception": f"{type(error).__name__}: {_withhold_quotes(theirs, error)}"
        if error
        else None,
        "in_flight": engine.in_flight,
        "counters": dict(engine.counters),
        "deliveries": engine.deliveries,
        "since_delivery_s": round(engine.clock - engine.delivered, 3),
        "requests": [entry.describe(engine.clock) for entry in known],
    }


def write(status: int, error: BaseException | None, known: dict[str, Any]) -> None:
    """Write the report, as a whole or not at all. Only its owner can read it. Raises OSError."""
    folder = Path(settings.current.report_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(known | _content(status, error), indent=1)
    # mkstemp makes the file with mode 0600.
    handle, scratch = tempfile.mkstemp(prefix=".", dir=folder)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"{_FILE_PREFIX}{stamp}-{os.getpid()}-{time.monotonic_ns()}.json"
        os.rename(scratch, folder / name)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
    reports = sorted(folder.glob(f"{_FILE_PREFIX}*.json"), key=lambda p: p.stat().st_mtime_ns)
    for old in reports[:-REPORTS_KEPT]:
        old.unlink(missing_ok=True)


def stack(thread_id: int | None) -> list[str]:
    """Return a thread's frames as "file:line function", the outermost first."""
    frame = sys._current_frames().get(thread_id or 0)
    if frame is None:
        return []
    return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)]


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
        "traceback": _traceback(error),
        "memory": _memory(),
        "threads": {names.get(ident, str(ident)): stack(ident) for ident in sys._current_frames()},
    }


def _traceback(error: BaseException | None) -> list[str]:
    if error is None:
        return []
    return traceback.format_list(traceback.extract_tb(error.__traceback__))


def _withhold_quotes(theirs: list[str], message: object) -> str:
    """Return `message` on one line, unless it quotes a request: then say that it is withheld."""
    flat = report.one_line(message)
    runs = {flat[i : i + QUOTE_LENGTH] for i in range(len(flat) - QUOTE_LENGTH + 1)}
    for text in theirs:
        short = " ".join(text[:_COMPARED_LENGTH].split())
        if (len(short) < QUOTE_LENGTH and short in flat) or any(run in short for run in runs):
            return "[withheld: it quotes a request; the log has it]"
    return flat


def _texts(value: Any) -> list[str]:
    """List every string in a request that is longer than three characters."""
    if isinstance(value, str):
        return [value] if len(value) > 3 else []  # noqa: PLR2004
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [text for item in value for text in _texts(item)]


def _memory() -> dict[str, int]:
    """Return the peak of the process and MLX's own figures, in bytes. This takes no lock of MLX."""
    # macOS gives bytes, Linux gives KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    figures = {"peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    mx = sys.modules.get("mlx.core")
    if mx is not None:
        figures |= {"mlx_active": mx.get_active_memory(), "mlx_cache": mx.get_cache_memory()}
        figures["mlx_peak"] = mx.get_peak_memory()
    return figures
