"""`python -m shim doctor` says whether this interpreter would start a guarded server.

Where it would not, the doctor says what to do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import __version__, guards
from ..core import catalogue, memory, settings, values
from ..models import model_names
from ..planning import local_model
from . import memory_budget, path, releases

HELP = (
    "print versions, guard states and settings for this interpreter, and with --model a memory"
    " budget; status 1 if a guard that is on is not active"
)

_ABSENT = "is not installed"
# Seconds for the child: importing mlx_lm may take long on a slow disk.
_ASK_LIMIT = 300
# A child that starts like the server runs this program, so the guards answer where they act. The
# answer goes to a file, because a chained sitecustomize may print anything.
_PROBE = """\
import json, sys
import mlx_lm.server
split = [(name.partition("."), module) for name, module in sys.modules.items()]
ours = {inner: m for (first, dot, inner), m in split if dot and first in ("shim", "_mlx_lm_shim")}
states = ours["core.report"].states if "boot" in ours else None
site = sys.modules.get("sitecustomize")
with open(sys.argv[1], "w") as answer:
    json.dump({
        "states": states and {k: [v.kind, v.reason] for k, v in states.items()},
        "wrapt": ours["core.patch"].missing if "boot" in ours else "",
        "chained": site and getattr(site, "__file__", None),
    }, answer)
"""


def main(model: str | None = None) -> int:
    """Return 0, 1 if a server would not be guarded, or 2 if `model` is not on this machine."""
    print(f"mlx-lm-shim {__version__}, in {path.folder()}")
    print(f"Python {sys.version.split()[0]}, {sys.executable}")
    for name in ("mlx-lm", "mlx", "wrapt"):
        print(f"{name} {_version(name)}")
    release = _version("mlx-lm")
    if release != _ABSENT:
        print(releases.verdict(release))
    total = memory.total()
    print(f"memory of this machine: {memory.format_bytes(total) if total else 'not known'}")
    if model is not None:
        try:
            memory_budget.show(model, total)
        except local_model.NotHere as error:
            named = model_names.quote_name(model)
            print(
                f"mlx-lm-shim: --model {named}: {error}; {local_model.ACCEPTED}",
                file=sys.stderr,
            )
            return 2
    found = _ask()
    if isinstance(found, str):
        print(f"NOT GUARDED: {found}")
        return 1
    faults = _print_guards(found) + _print_settings()
    print(f"\nsitecustomize chained: {found['chained'] or 'none'}")
    if not _is_injected():
        print(
            "This shell's PYTHONPATH does not name the shim."
            f" Start the server with PYTHONPATH={path.pythonpath()}"
        )
    for fault in faults:
        print(f"FIX: {fault}")
    return 1 if faults else 0


def _is_injected() -> bool:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return path.folder() in {Path(p).resolve() for p in given if p}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT


def _ask() -> dict[str, Any] | str:
    """Ask the guards in a child interpreter. Where that fails, return why and what to do.

    The child gets this shell's PYTHONPATH, with the shim put in front if it is not there.
    """
    environ = dict(os.environ) if _is_injected() else os.environ | {"PYTHONPATH": path.pythonpath()}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        command = [sys.executable, "-c", _PROBE, str(answer)]
        try:
            child = subprocess.run(
                command, env=environ, capture_output=True, check=False, timeout=_ASK_LIMIT
            )
        except subprocess.TimeoutExpired:
            return (
                "the guards cannot be asked: mlx_lm.server was not imported within"
                f" {_ASK_LIMIT} s\n"
                f"FIX: see what {sys.executable} -X importtime -c 'import mlx_lm.server' waits for"
            )
        said = child.stderr.decode(errors="replace").strip()
        if not answer.exists() or child.returncode != 0:
            last = (said.splitlines() or [f"status {child.returncode}"])[-1]
            return (
                f"mlx_lm.server cannot be imported: {last}\n"
                "FIX: pip install mlx-lm (on Linux also mlx[cpu])"
            )
        found: dict[str, Any] = json.loads(answer.read_text())
    if found["states"] is not None:
        return found
    if os.environ.get(settings.KILL_SWITCH, "").strip().lower() in values.OFF:
        return f"the kill switch {settings.KILL_SWITCH} is off\nFIX: unset {settings.KILL_SWITCH}"
    fix = f"FIX: put {path.folder()} first on PYTHONPATH"
    if found["chained"]:
        return f"{found['chained']} comes first and ours never runs\n{fix}"
    return f"the shim did not start: {said or 'no reason given'}\n{fix}"


def _print_guards(found: dict[str, Any]) -> list[str]:
    """Print the state of every guard. Return what to do about those that are on and do not work."""
    print("\nguards")
    faults = [f"pip install 'wrapt>=1.16,!=2.2.0': {found['wrapt']}"] if found["wrapt"] else []
    in_force = settings.load()[0]
    unkept = _asked_for(in_force)
    for name, (kind, reason) in found["states"].items():
        print(f"  {name:24}{kind}{f' ({reason})' if reason else ''}")
        if name in unkept and kind not in ("active", "degraded", "off"):
            faults.append(
                f"{name} is {kind}: {reason};"
                f" the server does not start (78) while {unkept[name]} is set"
            )
        elif kind in ("incompatible", "failed"):
            faults.append(
                f"{name} is {kind}: {reason}; a newer shim may know this mlx-lm;"
                f" {settings.variable(name)}=0 accepts it"
            )
        elif kind == "degraded" and in_force.strict > 1:
            faults.append(
                f"{name} is degraded: {reason};"
                f" with {settings.variable('strict')}=2 the server exits 78"
            )
    return faults


def _asked_for(in_force: settings.Settings) -> dict[str, str]:
    """For each required guard that is asked for: the variable that asks for it.

    While that variable is set, no server starts unless the guard works.
    """
    required = {
        name: guards.settings_of(name)[0] for name in catalogue.GUARDS if guards.is_required(name)
    }
    return {
        name: settings.variable(setting)
        for name, setting in required.items()
        if getattr(in_force, setting)
    }


def _print_settings() -> list[str]:
    """Print every setting. Return what to do where MLX_SHIM_STRICT=1 would refuse to start."""
    in_force, bad, unknown = settings.load()
    print("\nsettings in force")
    for row in settings.table():
        given = os.environ.get(row.variable, "").strip()
        if any(text.startswith(f"{row.variable}=") for text in bad):
            given = ""
        # os.path, because it never raises. The value may be the secret itself: it is not shown.
        missing = not os.path.exists(os.path.expanduser(given))  # noqa: PTH110, PTH111
        if row.kind == "file" and given and missing:
            given = "(no file)"
        print(f"  {row.variable:32}{given or row.default:10}{'set' if given else 'default'}")
    for text in (*bad, *unknown):
        print(f"  {text}")
    return [
        f"{text}; with {settings.variable('strict')}=1 the server exits 78"
        for text in bad
        if in_force.strict
    ]
