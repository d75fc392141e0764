"""The documentation says what the code does, where that can be checked."""

from __future__ import annotations

import importlib
import re

from harness import REPO

from shim import fatal, settings
from shim.guards import GUARDS


def rows(page: str) -> list[list[str]]:
    lines = (REPO / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def test_the_environment_page_is_the_table():
    wanted = [[f"`{r.variable}`", r.kind, f"`{r.default}`", r.meaning] for r in settings.table()]
    assert rows("environment.md") == wanted


def test_the_exit_codes_page_has_every_code():
    codes = {getattr(fatal, name) for name in dir(fatal) if name.startswith("EX_")} | {fatal.STOPPED}
    assert {int(row[0].strip("`")) for row in rows("exit-codes.md")} >= codes


def test_every_guard_is_in_the_readme_and_alike():
    readme = (REPO / "README.md").read_text()
    for name in GUARDS:
        guard = importlib.import_module(f"shim.guards.{name}")
        assert f"`{name}`" in readme
        assert guard.__doc__
        assert all(hasattr(guard, part) for part in ("UPSTREAM", "MODULE", "probe", "apply")), name


def test_every_link_between_pages_leads_somewhere():
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
