"""docs/environment.md: its rows are those of settings.py, grouped by subject."""

from __future__ import annotations

import re

from kit.harness import REPO
from shim.core import settings
from shim.core.catalogue import GUARDS

PAGE = REPO / "docs" / "environment.md"
_ROW = re.compile(r"^\| `(MLX_SHIM\w*)` \|.*$", re.MULTILINE)


def rows() -> dict[str, str]:
    """The row of each setting, by its variable. The switches of guards have none."""
    switches = {settings.variable(name) for name in GUARDS}
    return {
        row.variable: f"| `{row.variable}` | {row.kind} | `{row.default}` | {row.meaning} |"
        for row in settings.table()
        if row.variable not in switches
    }


def written() -> list[tuple[str, str]]:
    """Variable and row, as the page has them."""
    return [(found[1], found[0]) for found in _ROW.finditer(PAGE.read_text())]


def page() -> str:
    """The page with each row as settings.py has it now."""
    wanted = rows()
    return _ROW.sub(lambda found: wanted.get(found[1], found[0]), PAGE.read_text())
