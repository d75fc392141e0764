"""The documentation says what the code does, where a test can check that."""

from __future__ import annotations

import importlib
import re

import pytest

from kit.drift import cases, mutate, stock_package
from kit.drift.server import package_of
from kit.harness import LINES, REPO
from kit.pages import guards_page
from shim.core import settings
from shim.core.catalogue import GUARDS
from shim.engine import fatal


def rows(page: str) -> list[list[str]]:
    lines = (REPO / "docs" / page).read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]


def test_the_environment_page_is_the_table():
    wanted = [[f"`{r.variable}`", r.kind, f"`{r.default}`", r.meaning] for r in settings.table()]
    assert rows("environment.md") == wanted


def test_the_exit_codes_page_has_every_code():
    codes = {getattr(fatal, name) for name in dir(fatal) if name.startswith("EX_")} | {
        fatal.STOPPED
    }
    assert {int(row[0].strip("`")) for row in rows("exit-codes.md")} >= codes


def test_the_page_of_guards_is_what_the_guards_say():
    assert guards_page.PAGE.read_text() == guards_page.page(), "run python tests/bench/guards.py"


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_says_what_goes_wrong_and_what_it_does(name):
    guard = importlib.import_module(f"shim.guards.{name}")
    assert all(hasattr(guard, part) for part in ("UPSTREAM", "MODULE", "probe", "apply"))
    defect, _, answer = guard.__doc__.partition("\n\n")
    assert defect.endswith(".")
    assert re.search(r"\b(Here|With MLX_SHIM_)", answer), (
        "a sentence that begins with Here must say what happens instead"
    )


def test_the_readme_is_for_somebody_with_three_minutes():
    lines = (REPO / "README.md").read_text().splitlines()
    assert len(lines) <= 70
    assert max(map(len, lines)) <= 120
    assert any(f"{len(GUARDS)} guards]" in line for line in lines)


def test_every_link_between_pages_leads_somewhere():
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_names_has_every_name_that_is_touched(tmp_path):
    """tests/bench/drift.py writes it, from a run with all names."""
    page = (REPO / "docs" / "names.md").read_text()
    for line in LINES:
        wanted = {
            f"{module}.{path}"
            for module, path, _ in cases.cases(cases.touched(line, tmp_path), ["renamed"])
        }
        written = set(re.findall(rf"^\| {re.escape(line)} \| `([^`]+)` \|", page, re.MULTILINE))
        unknown = {name for name in wanted - written if drift_makes_sense(line, name)}
        assert not unknown, f"{line}: run tests/bench/drift.py"
    assert ", 0 not as they should be, 0 in which the heart was lost." in page


def drift_makes_sense(line, name):
    """Whether some change is possible. A name outside of mlx_lm cannot be changed."""
    sources = stock_package.read(package_of(line))
    module = max((m for m in sources if name.startswith(f"{m}.")), key=len)
    path = name.removeprefix(f"{module}.")
    return any(mutate.mutate(sources, module, path, kind) is not None for kind in mutate.KINDS)
