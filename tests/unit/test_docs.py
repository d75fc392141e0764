"""The documentation says what the code does, where a test can check that."""

from __future__ import annotations

import importlib
import re

import pytest

from kit.drift import cases, mutate, stock_package
from kit.drift.server import package_of
from kit.harness import LINES, REPO
from kit.pages import environment, guards_page
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


def test_the_environment_page_has_each_setting_once():
    wanted = sorted(environment.rows().items())
    assert sorted(environment.written()) == wanted, "python tests/bench/environment.py writes it"


def test_the_environment_page_names_each_switch():
    page = environment.PAGE.read_text()
    assert not [name for name in GUARDS if f"`{settings.variable(name)}`" not in page]


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


PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """What GitHub makes of the headings of a page."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_and_anchor_leads_somewhere(page):
    dead = []
    for target, anchor in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists():
            dead.append(target)
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            dead.append(f"{target}#{anchor}")
    assert not dead, f"{page.relative_to(REPO)} has links that lead nowhere: {', '.join(dead)}"


def test_every_page_is_in_the_index():
    index = REPO / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target, _ in _LINK.findall(index.read_text())}
    missing = {page.relative_to(REPO) for page in PAGES[1:] if page != index and page not in linked}
    assert not missing, f"docs/README.md does not name {', '.join(map(str, sorted(missing)))}"


_CODE_NAMES_PAGES = re.compile(r"docs/([\w/-]+\.md)(?:#([\w-]+))?")


def test_every_page_that_the_code_names_is_there():
    for path in sorted((REPO / "shim").rglob("*.py")):
        for name, anchor in _CODE_NAMES_PAGES.findall(path.read_text()):
            page = REPO / "docs" / name
            assert page.exists(), f"{path.relative_to(REPO)} names docs/{name}"
            assert not anchor or anchor in anchors(page), f"{path.relative_to(REPO)}: #{anchor}"


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


_HELPER = re.compile(r"`(answers|errors|patch|report|verdicts|drain|facts|fatal|watchdog)\.(\w+)")


def test_every_helper_that_adding_a_guard_names_is_there():
    named = set(_HELPER.findall((REPO / "docs" / "adding-a-guard.md").read_text()))
    assert len(named) > 10
    modules = {name: importlib.import_module(f"shim.{room}.{name}") for name, room in ROOM.items()}
    missing = [f"{module}.{name}" for module, name in named if not hasattr(modules[module], name)]
    assert not missing, f"docs/adding-a-guard.md names {', '.join(missing)}, which is not there"


ROOM = dict.fromkeys(("answers", "errors", "patch", "report", "verdicts"), "core") | dict.fromkeys(
    ("drain", "facts", "fatal", "watchdog"), "engine"
)
