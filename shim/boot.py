"""Reads the settings and has the guards applied. Called once, just before mlx_lm runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from . import __version__, guards
from .core import catalogue, main_module, patch, report, settings
from .core.verdicts import Incompatible, NotConfigured, Refused, Retired
from .engine import facts, fatal, observe

# Lines that wait until a server starts.
_bad_values: list[str] = []
_unknown_names: list[str] = []
_blind: list[str] = []
# The guards that were applied, and their states before `facts.judge` changes them.
_at_work: dict[str, report.State] = {}
# Whether the start-up line was written.
_announced = False
_server = "mlx_lm.server"


def start() -> None:
    """Register every guard, so that it is applied when its module of mlx_lm is imported.

    This writes nothing to stderr; the lines wait until a server starts.
    """
    settings.current, bad, unknown = settings.load()
    _bad_values.extend(bad)
    _unknown_names.extend(unknown)
    if settings.current.debug:
        report.enable_debug()
    by_module: dict[str, list[str]] = {_server: []}
    for name in catalogue.GUARDS:
        by_module.setdefault(_guard(name).MODULE, []).append(name)
    hooks = {module: _hook(names) for module, names in by_module.items()}
    if patch.wrapt is not None:
        for module, hook in hooks.items():
            patch.wrapt.register_post_import_hook(hook, module)
        sys.meta_path.insert(0, main_module.ServerFinder(_server, None))
        return
    sys.meta_path.insert(0, main_module.ServerFinder(_server, hooks.pop(_server)))
    for name in (name for module in hooks for name in by_module[module]):
        on = settings.current.guard_is_on(name)
        report.states[name] = report.State("incompatible", "it needs wrapt") if on else _off(name)


def _guard(name: str) -> Any:
    return importlib.import_module(f"{guards.__name__}.{name}")


def _hook(names: list[str]) -> Callable[[Any], None]:
    """Return a post-import hook that applies these guards.

    The hook must not raise: that would make the import of mlx_lm's module fail.
    """

    def hook(module: Any) -> None:
        for name in names:
            report.states[name] = _apply(name, module)
            if report.states[name].kind in ("active", "degraded"):
                _at_work[name] = report.states[name]
        # The observers come last, so that their wrappers are the outermost.
        if module.__name__ == _server:
            try:
                observe.install(module, on_start=_on_server_start)
            except Exception as error:
                _blind.append(f"{module.__name__} cannot be watched: {error!r}")
            facts.on_loss.append(_judge)
            _try_to_judge()

    return hook


def _try_to_judge() -> None:
    try:
        _judge()
    except Exception as error:
        _blind.append(f"the states of the guards cannot be told: {error!r}")


def _judge() -> None:
    """Compute the states of the guards at work from the facts that can be seen now.

    After the start-up line, a line says which states have changed.
    """
    for name, own in _at_work.items():
        if report.states[name].kind == "failed":
            continue
        kind, reason = facts.judge(getattr(_guard(name), "LIVES_BY", {}))
        if kind == "active" and own.reason:
            kind = own.kind
        state = report.State(kind, "; ".join(text for text in (own.reason, reason) if text))
        if _announced and state != report.states[name]:
            report.line(f"{name} is {state} from now on")
        report.states[name] = state


_KINDS: dict[type[Exception], report.Kind] = {
    NotConfigured: "off",
    Retired: "retired",
    Incompatible: "incompatible",
    Refused: "failed",
}


def _apply(name: str, module: Any) -> report.State:
    guard = _guard(name)
    asked_for = guards.settings_of(name)
    if not settings.current.guard_is_on(name) or (
        asked_for and not any(map(settings.is_set, asked_for))
    ):
        return _off(name)
    try:
        lost = guard.probe(module)
        with patch.undo_on_error():
            guard.apply(module)
    except tuple(_KINDS) as reason:
        return report.State(_KINDS[type(reason)], str(reason))
    except Exception as error:
        return report.State("failed", report.one_line(repr(error)))
    return report.State("degraded", lost) if lost else report.State("active")


def _off(name: str) -> report.State:
    if not settings.current.guard_is_on(name):
        return report.State("off", f"{settings.variable(name)} is off")
    *others, last = map(settings.variable, guards.settings_of(name))
    return report.State(
        "off", f"{', '.join(others)} and {last} are not set" if others else f"{last} is not set"
    )


def _on_server_start() -> None:
    """Write the start-up lines, once, and end the process if it must not start.

    That happens before the model is loaded.
    """
    global _announced
    if _announced:
        return
    _announced = True
    for text in (*_bad_values, *_unknown_names, *_blind):
        report.line(text)
    if patch.missing:
        report.line(f"{patch.missing}: guards outside the server are off; install wrapt")
    _announce()
    unkept = _unkept()
    if unkept:
        fatal.prepare()
        fatal.die(fatal.EX_CONFIG, "; ".join(unkept))
    if settings.current.strict:
        refused = ("incompatible", "failed", "degraded")[: settings.current.strict + 1]
        broken = [name for name, state in report.states.items() if state.kind in refused]
        reasons = [*broken, *_blind, *_bad_values]
        if reasons:
            fatal.prepare()
            fatal.die(fatal.EX_CONFIG, "MLX_SHIM_STRICT refuses to start: " + "; ".join(reasons))


def _announce() -> None:
    """Write the start-up line, then a line for each impaired guard and each setting in force."""
    kinds = [state.kind for state in report.states.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in report.KINDS if kind in kinds)
    versions = f"mlx-lm {report.version_of('mlx-lm')}, mlx {report.version_of('mlx')}"
    lost = [
        name
        for name in catalogue.HEART
        if name in report.states and report.states[name].kind in ("incompatible", "failed")
    ]
    heart = f"; LOST: {', '.join(lost)}" if lost else ""
    report.line(f"{__version__}, {versions}; guards: {counts}{heart}")
    for name, state in report.states.items():
        if state.kind in ("degraded", "incompatible", "failed"):
            report.line(f"{name} {state}")
        else:
            report.debug(f"{name} {state}")
    for name, value in settings.in_force():
        report.line(f"{name}={value}")


def _unkept() -> list[str]:
    """List what settings ask for and no guard does: the reasons not to start.

    If the guard's own switch is the cause, the server starts, and a line says so.
    """
    reasons = []
    for name in catalogue.GUARDS:
        asked_by = [setting for setting in guards.settings_of(name) if settings.is_set(setting)]
        if not asked_by or not guards.is_required(name):
            continue
        needs = asked_by[0]
        state = report.states.get(name)
        if not settings.current.guard_is_on(name):
            report.line(
                f"{settings.variable(needs)} has no effect: {settings.variable(name)} is off"
            )
        elif state is None or state.kind not in ("active", "degraded"):
            asked = settings.variable(needs)
            reasons.append(f"what {asked} asks for cannot be given: {name} {state}")
    return reasons
