"""docs/adding-a-guard.md, followed exactly in a copy of the tree, makes a guard that works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from kit import headline
from kit.harness import LINES, NEWEST, REPO, VENVS, clean_environ, python_of

PAGE = "adding-a-guard.md"
NAME = "unparsable_404"
# For pytest's `-o`: the markers that the page uses, whatever pyproject.toml declares.
MARKERS = "markers=guard\ncontrol"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of all that the guard and its test need, with the page's blocks in their places."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("shim", "tests/kit"):
        shutil.copytree(REPO / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("sitecustomize.py", "pyproject.toml", "tests/conftest.py"):
        shutil.copy(REPO / file, tree / file)
    guard, catalogue = tree / f"shim/guards/{NAME}.py", tree / "shim/core/catalogue.py"
    guard.write_text(headline.recipe("MODULE =", PAGE))
    lines = headline.recipe('"untruthful_health",', PAGE)
    after = lines.splitlines()[-1] + "\n"
    assert catalogue.read_text().count(after) == 2, "in the list, and in the heart"
    catalogue.write_text(catalogue.read_text().replace(after, lines, 1))
    (tree / "tests/process").mkdir()
    test = tree / f"tests/process/test_{NAME}.py"
    test.write_text(headline.recipe("pytest.mark.control", PAGE))
    return tree


def run(tree, *command):
    """The output of a command. The tree's own sitecustomize is on the path."""
    environ = clean_environ(MLX_LM_SHIM_TEST_VENVS=os.fspath(VENVS), PYTHONPATH=str(tree))
    ran = subprocess.run(
        command, cwd=tree, env=environ, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_guard_and_its_control_pass_on_both_lines(tree):
    test = f"tests/process/test_{NAME}.py"
    said = run(tree, python_of(NEWEST), "-m", "pytest", "-q", "-o", MARKERS, test)
    assert f"{2 * len(LINES)} passed" in said


def test_the_guard_is_inside_the_one_that_answers_health(tree):
    program = (
        "import json, mlx_lm.server; from shim.core import patch; "
        "print(json.dumps(patch.layers['APIHandler.do_GET']))"
    )
    said = run(tree, python_of(NEWEST), "-c", program)
    assert json.loads(said)[:2] == [NAME, "untruthful_health"]


def test_the_guard_is_clean(tree):
    files = [f"shim/guards/{NAME}.py", f"tests/process/test_{NAME}.py"]
    python = python_of(NEWEST)
    run(tree, python, "-m", "ruff", "check", *files)
    run(tree, python, "-m", "ruff", "format", "--check", *files)
    run(tree, python, "-m", "mypy", "--follow-imports=silent", files[0])
