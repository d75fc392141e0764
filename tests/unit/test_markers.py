"""Every guard has a test and a negative control, as the marks say, and `--guard` finds them.

The marks are read from the syntax trees of the tests, so that nothing has to be collected.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap

import pytest

from kit.harness import REPO, clean_environ
from shim.core.catalogue import GUARDS

KINDS = ("guard", "control")
TESTS = REPO / "tests"


class Marks(ast.NodeVisitor):
    """The marks of one file: (kind, guard, line). What cannot be read as a mark is in `wrong`."""

    def __init__(self, source: str) -> None:
        self.found: list[tuple[str, str, int]] = []
        self.wrong: list[str] = []
        self._placed: set[ast.AST] = set()
        tree = ast.parse(source)
        self.visit(tree)
        for node in ast.walk(tree):
            if self._kind_of(node) and node not in self._placed:
                self.wrong.append(f"line {node.lineno}: the mark is on no test")

    @staticmethod
    def _kind_of(node: ast.AST) -> str | None:
        """`guard` or `control`, where the node is pytest.mark.guard or pytest.mark.control."""
        if not isinstance(node, ast.Attribute) or node.attr not in KINDS:
            return None
        return node.attr if ast.unparse(node.value) == "pytest.mark" else None

    def _take(self, *nodes: ast.AST) -> None:
        """Take up the marks among these expressions, each of which may be a list of marks."""
        for node in nodes:
            if isinstance(node, (ast.List, ast.Tuple)):
                self._take(*node.elts)
                continue
            mark = node.func if isinstance(node, ast.Call) else node
            if kind := self._kind_of(mark):
                self._placed.add(mark)
                names = node.args if isinstance(node, ast.Call) else []
                self._note(kind, names, node.lineno)

    def _note(self, kind: str, names: list[ast.expr], line: int) -> None:
        if not names:
            self.wrong.append(f"line {line}: the mark {kind} names no guard")
        for name in names:
            if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
                self.wrong.append(f"line {line}: {ast.unparse(name)} is not a name in quotes")
            elif name.value not in GUARDS:
                self.wrong.append(f"line {line}: {name.value!r} is not the name of a guard")
            else:
                self.found.append((kind, name.value, line))

    def _take_decorators(self, node: ast.FunctionDef | ast.ClassDef, prefix: str) -> None:
        if node.name.startswith(prefix):
            self._take(*node.decorator_list)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._take_decorators(node, "test")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._take_decorators(node, "Test")

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(ast.unparse(target) == "pytestmark" for target in node.targets):
            self._take(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "pytest.param":
            self._take(*(word.value for word in node.keywords if word.arg == "marks"))
        self.generic_visit(node)


@pytest.fixture(scope="module")
def marks():
    """{file: its Marks}, of all files with tests."""
    files = sorted(TESTS.rglob("test_*.py"))
    return {str(file.relative_to(REPO)): Marks(file.read_text()) for file in files}


def test_each_mark_is_on_a_test_and_names_a_guard(marks):
    wrong = [f"{file}, {what}" for file, found in marks.items() for what in found.wrong]
    assert not wrong, "\n".join(wrong)


def test_each_guard_has_a_test_and_a_control(marks):
    marked = {(kind, name) for found in marks.values() for kind, name, _ in found.found}
    missing = [
        f"no test is marked @pytest.mark.{kind}({name!r})"
        for name in GUARDS
        for kind in KINDS
        if (kind, name) not in marked
    ]
    assert not missing, "\n".join(missing)


def test_marks_are_found_wherever_pytest_takes_them():
    found = Marks(
        textwrap.dedent("""
        pytestmark = [pytest.mark.slow, pytest.mark.guard("stall")]
        CASES = [pytest.param(1, marks=pytest.mark.control("stall"))]
        @pytest.mark.guard("bad_request", "open_door")
        @pytest.mark.parametrize("n", [pytest.param(1, marks=[pytest.mark.control("any_model")])])
        def test_one(n): ...
        @pytest.mark.guard("crash_loop")
        class TestMany:
            pytestmark = pytest.mark.control("crash_loop")
            @pytest.mark.control("endless_wait")
            def test_two(self): ...
        """)
    )
    assert found.wrong == []
    assert sorted((kind, name) for kind, name, _ in found.found) == [
        ("control", "any_model"),
        ("control", "crash_loop"),
        ("control", "endless_wait"),
        ("control", "stall"),
        ("guard", "bad_request"),
        ("guard", "crash_loop"),
        ("guard", "open_door"),
        ("guard", "stall"),
    ]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('@pytest.mark.guard("stal")\ndef test_one(): ...', "'stal' is not the name of a guard"),
        ("@pytest.mark.control\ndef test_one(): ...", "the mark control names no guard"),
        ("@pytest.mark.guard()\ndef test_one(): ...", "the mark guard names no guard"),
        ("@pytest.mark.guard(NAME)\ndef test_one(): ...", "NAME is not a name in quotes"),
        ('@pytest.mark.guard("stall")\ndef helper(): ...', "the mark is on no test"),
        ('MARK = pytest.mark.control("stall")', "the mark is on no test"),
    ],
)
def test_a_mark_that_says_nothing_is_told_of(source, says):
    assert Marks(source).found == []
    (told,) = Marks(source).wrong
    assert told == f"line 1: {says}"


def run_pytest(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=REPO,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


FILES = [
    f"tests/process/test_{name}.py"
    for name in ("frozen_interpreter", "misfiled_cache", "pinned_batch")
]


def test_the_option_keeps_the_tests_of_these_guards():
    ran = run_pytest("--collect-only", "--guard=misfiled_cache", "--guard=pinned_batch", *FILES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    collected = {line.partition("::")[0] for line in ran.stdout.splitlines() if "::" in line}
    assert collected == set(FILES[1:])
    assert "deselected" in ran.stdout


def test_the_option_refuses_an_unknown_name_and_lists_the_accepted():
    ran = run_pytest("--collect-only", "--guard=stal", *FILES)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    told = ran.stdout + ran.stderr
    assert "stal" in told
    assert all(name in told for name in GUARDS)


def test_pytest_tells_of_both_marks():
    told = run_pytest("--markers").stdout
    assert all(f"@pytest.mark.{kind}(name, ...): " in told for kind in KINDS)


def test_quick_has_a_test_and_a_control_of_each_guard_on_the_newest_line():
    """Except the guards that only older releases need."""
    collect = ["--collect-only", "-q", "--quick", "tests/process"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *collect],
        cwd=REPO,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    kept = [line for line in child.stdout.splitlines() if "::" in line]
    assert len(GUARDS) // 2 < len(kept) < 2 * len(GUARDS)
    assert not [line for line in kept if "0.31.3" in line or "0.32.0" in line]
