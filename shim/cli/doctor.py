"""`python -m shim doctor`: would a server started by this interpreter be guarded, and if not, what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import __version__, settings
from . import path

HELP = "print versions, guard states and settings for this interpreter; status 1 if a guard that is on is not active"

# Run in a child that starts as the server would: the guards are asked there, in the place where they act.
_PROBE = """\
import json, sys
import mlx_lm.server
modules = {name.split(".", 1)[1]: m for name, m in sys.modules.items() if name.split(".")[0] in ("shim", "_mlx_lm_shim") and "." in name}
site = sys.modules.get("sitecustomize")
print("\\n" + json.dumps({
    "states": {k: [v.kind, v.reason] for k, v in modules["report"].states.items()} if "report" in modules else None,
    "wrapt": modules["patch"].missing if "patch" in modules else "",
    "chained": site and getattr(site, "__file__", None),
}))
"""


def main() -> int:
    print(f"mlx-lm-shim {__version__}, in {path.folder()}")
    print(f"Python {sys.version.split()[0]}, {sys.executable}")
    for name in ("mlx-lm", "mlx", "wrapt"):
        print(f"{name} {_version(name)}")
    found = _ask()
    if isinstance(found, str):
        print(f"NOT GUARDED: {found}")
        return 1
    faults = _print_guards(found)
    _print_settings()
    print(f"\nsitecustomize chained: {found['chained'] or 'none'}")
    here = {Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    if path.folder() not in here:
        print(f"This shell's PYTHONPATH does not name the shim. Start the server with PYTHONPATH={path.pythonpath()}")
    for fault in faults:
        print(f"FIX: {fault}")
    return 1 if faults else 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _ask() -> dict[str, Any] | str:
    """What the guards say in a child interpreter, or why that cannot be known and what to do."""
    child = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=os.environ | {"PYTHONPATH": path.pythonpath()},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return f"mlx_lm.server cannot be imported: {last}\nFIX: pip install mlx-lm (on Linux also mlx[cpu])"
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    if found["states"] is None:
        if not settings.parse_switch(os.environ.get(settings.KILL_SWITCH) or "1"):
            return f"the kill switch {settings.KILL_SWITCH} is off\nFIX: unset {settings.KILL_SWITCH}"
        return f"the shim did not start: {child.stderr.strip()}\nFIX: put {path.folder()} first on PYTHONPATH"
    return found


def _print_guards(found: dict[str, Any]) -> list[str]:
    """Print the state of every guard; return what to do about those that are on and not at work."""
    print("\nguards")
    faults = [f"pip install 'wrapt>=1.16,!=2.2.0': {found['wrapt']}"] if found["wrapt"] else []
    for name, (kind, reason) in found["states"].items():
        print(f"  {name:24}{kind}{f' ({reason})' if reason else ''}")
        if kind in ("incompatible", "failed"):
            faults.append(
                f"{name} is {kind}: {reason}; a newer shim may know this mlx-lm; {settings.variable(name)}=0 accepts it"
            )
    return faults


def _print_settings() -> None:
    _, bad, unknown = settings.load()
    print("\nsettings in force")
    for row in settings.table():
        given = os.environ.get(row.variable, "").strip()
        if any(text.startswith(f"{row.variable}=") for text in bad):
            given = ""
        print(f"  {row.variable:32}{given or row.default:10}{'set' if given else 'default'}")
    for text in (*bad, *unknown):
        print(f"  {text}")
