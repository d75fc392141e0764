"""The rooms of shim/, and which room may import which: only those below it."""

from __future__ import annotations

import ast
import json
import re
import subprocess

import pytest

from kit.harness import LINES, REPO, clean_environ, python_of
from shim.core.catalogue import GUARDS

SHIM = REPO / "shim"
# Each room, and the rooms that it may import. The tests fail for a room that is missing here.
BELOW = {
    "core": set(),
    "models": {"core"},
    "probing": {"core"},
    "engine": {"core"},
    "guards": {"core", "engine", "models", "probing"},
    "boot": {"core", "engine", "guards"},
    "planning": {"core", "models"},
    "units": {"core", "planning"},
    "cli": {"core", "guards", "models", "planning", "units"},
    "__main__": {"cli"},
}
ONLY_THE_COMMAND_LINE = ("planning", "units", "cli")


def parts(path):
    dotted = path.relative_to(SHIM).with_suffix("").parts
    return dotted[:-1] if dotted[-1] == "__init__" else dotted


MODULES = {parts(path): path for path in SHIM.rglob("*.py")}


def imports(module):
    """What a module of the shim imports from the shim, as the parts of dotted names."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(
                node.module.split(".") if node.module else ()
            )
            for alias in node.names:
                yield (*base, alias.name) if (*base, alias.name) in MODULES else base
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            assert not any(name.split(".")[0] == "shim" for name in names), (
                "a program may have its own module called shim"
            )


def arrows():
    return {(module, used) for module in MODULES for used in imports(module) if used}


def test_no_room_imports_one_above_it():
    assert {module[0] for module in MODULES if module} == set(BELOW), "a room is not in the table"
    wrong = {(a, b) for a, b in arrows() if a and a[0] != b[0] and b[0] not in BELOW[a[0]]}
    assert not wrong


def test_the_table_of_rooms_has_no_circle():
    for room in BELOW:
        seen, new = set(), {room}
        while new:
            seen |= new
            new = set().union(*(BELOW[each] for each in new)) - seen
            assert room not in new
    assert all(
        room in ("cli", "units", "planning", "__main__") or not below & set(ONLY_THE_COMMAND_LINE)
        for room, below in BELOW.items()
    )


def test_the_page_has_this_table():
    page = (REPO / "docs" / "how-it-works.md").read_text()
    table = page.partition("\n## The rooms of shim/\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[(\w+)\]\([^)]*\) \|[^|]*\| ([^|]*) \|$", table, re.MULTILINE)
    written = {room: set(re.findall(r"\w+", below)) - {"nothing"} for room, below in rows}
    assert written == {room: below for room, below in BELOW.items() if room != "__main__"}


def test_no_guard_imports_another():
    wrong = {
        (a, b)
        for a, b in arrows()
        if a[:1] == b[:1] == ("guards",) and len(b) > 1 and a[1:2] != b[1:2]
    }
    assert not wrong


def test_each_guard_is_a_file_or_a_folder_of_its_name():
    found = {module[1] for module in MODULES if len(module) > 1 and module[0] == "guards"}
    assert found == set(GUARDS)


_LOADED = """
import json, sys
from mlx_lm import server
ours = [name for name in sys.modules if name.split(".")[0] in ("shim", "_mlx_lm_shim")]
json.dump(ours, sys.stdout)
"""


@pytest.mark.parametrize("line", LINES)
def test_nothing_of_the_command_line_is_in_a_server(line):
    """Looked at after the import of the server's module, when its guards are applied."""
    environ = clean_environ() | {"PYTHONPATH": str(REPO)}
    told = subprocess.run(
        [python_of(line), "-c", _LOADED], env=environ, capture_output=True, text=True, check=True
    )
    loaded = {tuple(name.split(".")[1:]) for name in json.loads(told.stdout)}
    assert ("guards", "crash_loop") in loaded
    assert not [name for name in loaded if name[:1] and name[0] in ONLY_THE_COMMAND_LINE]
