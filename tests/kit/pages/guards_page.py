"""Makes docs/guards.md from the guards: what each says of itself, what asks for it, its switch."""

from __future__ import annotations

import importlib
import re
import textwrap
from typing import Any

from kit.harness import REPO
from shim.core import settings
from shim.core.catalogue import GUARDS, HEART
from shim.guards import is_required, settings_of

PAGE = REPO / "docs" / "guards.md"
ISSUES = {"mlx-lm": "ml-explore/mlx-lm", "mlx": "ml-explore/mlx"}

_HEAD = """# The guards

`python tests/bench/guards.py` makes this page from the guards: do not edit it. Each guard is one
file in [shim/guards](../shim/guards/__init__.py), named after a defect of the stock server, and has
a switch: `MLX_SHIM_<NAME>=0` turns it off. [How it works](how-it-works.md#guards) says which states
a guard can be in.

Without the first {heart} there is no promise. They are the heart: {names}.

"""


def page() -> str:
    """The page as it should be."""
    heart = ", ".join(f"[`{name}`](#{name})" for name in HEART)
    sections = [
        _section(name)
        for name in sorted(GUARDS, key=lambda name: (name not in HEART, GUARDS.index(name)))
    ]
    return _HEAD.format(heart=len(HEART), names=heart) + "\n".join(sections)


def _section(name: str) -> str:
    guard = importlib.import_module(f"shim.guards.{name}")
    lines = [
        f"## {name}",
        "",
        textwrap.dedent(str(guard.__doc__)).strip(),
        "",
        f"* Known from: {_link(guard.UPSTREAM)}",
    ]
    asked_by = [f"`{settings.variable(setting)}`" for setting in settings_of(name)]
    if asked_by:
        refuses = (
            " A server that cannot have what it asks for does not start (78)."
            if is_required(name)
            else ""
        )
        lines.append(f"* Asked for by: {', '.join(asked_by)}.{refuses}")
    lines += [f"* Where it cannot see {_facts(key)}: {cost}." for key, cost in _costs(guard)]
    return "\n".join([*lines, ""])


def _costs(guard: Any) -> list[tuple[Any, str]]:
    return [(key, cost or "it cannot act") for key, cost in getattr(guard, "LIVES_BY", {}).items()]


def _facts(key: str | tuple[str, ...]) -> str:
    return " nor ".join(f"`{fact}`" for fact in ([key] if isinstance(key, str) else key))


def _link(upstream: str) -> str:
    """Turn issue numbers into links."""

    def link(found: re.Match[str]) -> str:
        repository = ISSUES[found[1]]
        numbers = [
            f"[{n}](https://github.com/{repository}/issues/{n})"
            for n in re.findall(r"\d+", found[2])
        ]
        return f"{found[1]} {', '.join(numbers)}"

    return re.sub(r"\b(mlx-lm|mlx) (\d+(?:, \d+)*)", link, upstream)
