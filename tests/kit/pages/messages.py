"""docs/troubleshooting.md and the code: each line that the shim prints has a row.

The lines are found in the syntax trees. A message is known by its constant parts: what the code
fills in is a hole, "…" here. On the page a hole may have a name, <like this>, which does not
matter to the comparison.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from kit.harness import REPO

PAGE = REPO / "docs" / "troubleshooting.md"
HOLE = "…"
# The end of a called name: the position of the message, and what is printed before and after it.
SINKS = {
    "report.line": (0, "", ""),
    "report.once": (0, "", ""),
    "report.line_nowait": (0, "", ""),
    "report.debug": (0, "", ""),
    "report.contained": (0, "", f": {HOLE}"),
    "report.mark_failed": (1, f"{HOLE} failed: ", ""),
    "fatal.die": (1, "", ""),
    "fatal.exit_orderly": (1, "", ""),
    "Order": (0, "", ""),
    "sys.stderr.write": (0, "", ""),
    "getLogger('mlx_lm.server').warning": (0, "", ""),
    "getLogger('mlx_lm.server').error": (0, "", ""),
}
# As above, in one file alone. A function that passes a parameter on to one of these needs no row:
# its callers are found.
SINKS_OF = {
    "shim/core/settings.py": {"bad.append": (0, "", "")},
    "shim/boot.py": {"_blind.append": (0, "", ""), "reasons.append": (0, "", "")},
    "shim/engine/fatal.py": {"_take": (1, "", "")},
}
# Lists of messages that are not appended to one by one.
LISTS = {"shim/core/settings.py": ("unknown",)}
# Arguments that hold what another call, found by itself, has made: file, expression.
PASSED_ON = {
    ("shim/boot.py", "text"),
    ("shim/boot.py", "'; '.join(unkept)"),
    ("shim/core/report.py", "text"),
    ("shim/engine/fatal.py", "_verdict"),
    ("shim/cli/unit.py", "text"),
}


def in_code() -> dict[str, set[str]]:
    """Each message that the code can print, and the modules that print it."""
    found: dict[str, set[str]] = {}
    for path in [REPO / "sitecustomize.py", *sorted((REPO / "shim").rglob("*.py"))]:
        for text in _messages(path):
            # A hole alone is the name of a signal, or a text that another call has made.
            if text != HOLE:
                found.setdefault(text, set()).add(_module(path))
    return found


def _messages(path: Path) -> Iterator[str]:
    """A file's messages, and those that callers in its guard's folder give to its functions."""
    here = _File(path)
    yield from here.messages()
    for function, position in here.passing:
        for file in sorted(path.parent.glob("*.py")) if _is_in_folder(path) else [path]:
            yield from _File(file, {function: (position, "", "")}).messages()


def _is_in_folder(path: Path) -> bool:
    """Whether it belongs to a guard that is a folder."""
    return path.parent.parent.name == "guards"


def _module(path: Path) -> str:
    """What the page calls it: a guard by its name, else the module by its own."""
    return path.parent.name if _is_in_folder(path) else path.stem


def normal(text: str) -> str:
    """A message with its holes without names, and no more of them than there are words between."""
    text = re.sub("<[^>]*>", HOLE, " ".join(text.split())).removeprefix("mlx-lm-shim: ")
    return re.sub(rf"{HOLE}+", HOLE, text)


class _File:
    def __init__(self, path: Path, sinks: dict[str, tuple[int, str, str]] | None = None) -> None:
        self.name = str(path.relative_to(REPO))
        self.tree = ast.parse(path.read_text())
        self.sinks = sinks or SINKS | SINKS_OF.get(self.name, {})
        # Functions whose callers have the message, and the position of that parameter.
        self.passing: set[tuple[str, int]] = set()
        self.within = {
            child: function
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef)
            for child in ast.walk(function)
        }

    def messages(self) -> Iterator[str]:
        lists = LISTS.get(self.name, ()) if self.sinks.keys() >= SINKS.keys() else ()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._printed(node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in lists:
                assert isinstance(node.value, ast.ListComp)
                yield from self._texts(node.value.elt, node)

    def _printed(self, call: ast.Call) -> Iterator[str]:
        name = ast.unparse(call.func)
        for end, (position, before, after) in self.sinks.items():
            if name == end or name.endswith(f".{end}"):
                if len(call.args) > position:
                    argument = call.args[position]
                    yield from (
                        normal(before + text + after) for text in self._texts(argument, call)
                    )
                return
        if (
            name == "print"
            and "report.line" in self.sinks
            and any(ast.unparse(k.value) == "sys.stderr" for k in call.keywords)
        ):
            yield from self._texts(call.args[0], call)

    def _texts(self, node: ast.expr, at: ast.AST) -> Iterator[str]:
        """What an argument may be. Raises LookupError where that cannot be seen."""
        if (self.name, ast.unparse(node)) in PASSED_ON:
            return
        if isinstance(node, ast.IfExp):
            yield from self._texts(node.body, at)
            yield from self._texts(node.orelse, at)
        elif isinstance(node, ast.Name):
            values = list(self._assigned(node.id, at))
            for value in values:
                yield from self._texts(value, at)
            if not values and not self._is_parameter(node.id, at):
                raise LookupError(
                    f"{self.name}:{node.lineno}: what `{node.id}` holds when it is printed cannot "
                    "be seen: write the message into the call, or teach this module to find it"
                )
        else:
            yield normal(self._template(node, at))

    def _is_parameter(self, name: str, at: ast.AST) -> bool:
        """Whether the enclosing function is given it: then its callers have the message."""
        function = self.within.get(at)
        parameters = [a.arg for a in function.args.args if a.arg != "self"] if function else []
        if function is None or name not in parameters:
            return False
        self.passing.add((function.name, parameters.index(name)))
        return True

    def _assigned(self, name: str, at: ast.AST) -> Iterator[ast.expr]:
        for node in ast.walk(self.within.get(at, self.tree)):
            if not isinstance(node, ast.Assign):
                continue
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name) and target.id == name:
                yield value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for one, its in zip(target.elts, value.elts, strict=False):
                    if isinstance(one, ast.Name) and one.id == name:
                        yield its

    def _template(self, node: ast.expr, at: ast.AST) -> str:
        """The constant parts of an expression, with holes between them."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return re.sub(r"%[drs]", HOLE, node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._template(part, at) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._part(node.left, at) + self._part(node.right, at)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self._template(node.left, at)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            joined = node.args[0] if node.func.attr == "join" else None
            if isinstance(joined, ast.List):
                between = self._template(node.func.value, at)
                return between.join(self._part(part, at) for part in joined.elts)
        return HOLE

    def _part(self, node: ast.expr, at: ast.AST) -> str:
        """As `_template`, for a part that may be a name of the text."""
        values = list(self._assigned(node.id, at)) if isinstance(node, ast.Name) else [node]
        return self._template(values[0], at) if len(values) == 1 else HOLE


_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]*) \|(.*)$")


def on_page() -> list[tuple[str, set[str]]]:
    """Each message that has a row, and the modules that the row names."""
    rows = filter(None, map(_ROW.match, PAGE.read_text().splitlines()))
    return [(normal(row[1]), set(re.findall(r"\w+", row[2]))) for row in rows]


def missing() -> list[str]:
    """A row, to be completed, for each message that has none."""
    has = {text for text, _ in on_page()}
    return [
        _row(text, modules, " … | … |") for text, modules in in_code().items() if text not in has
    ]


def left_over() -> list[str]:
    """Messages on the page that the code does not print."""
    known = in_code()
    return [text for text, _ in on_page() if text not in known]


def misattributed() -> list[str]:
    known = in_code()
    return [
        f"{text}: {', '.join(sorted(known[text]))}"
        for text, modules in on_page()
        if text in known and modules != known[text]
    ]


def _row(text: str, modules: set[str], rest: str) -> str:
    return f"| `{text}` | {', '.join(sorted(modules))} |{rest}"


def renewed() -> str:
    """The page with each reworded message, and each module, as the code has it now."""
    known = in_code()
    lines = PAGE.read_text().splitlines()
    free = set(known) - {text for text, _ in on_page()}
    for number, line in enumerate(lines):
        row = _ROW.match(line)
        if row is None:
            continue
        text, modules = normal(row[1]), set(re.findall(r"\w+", row[2]))
        if text in known:
            lines[number] = _row(row[1], known[text], row[3])
            continue
        near = difflib.get_close_matches(
            text, [new for new in free if modules & known[new]] or list(free), 1, 0.5
        )
        if near:
            free.discard(near[0])
            lines[number] = _row(_with_names(near[0], row[1]), known[near[0]], row[3])
    return "\n".join(lines) + "\n"


def _with_names(new: str, old: str) -> str:
    """A message with the names that its holes had, where there are as many."""
    names = re.findall(f"<[^>]*>|{HOLE}", old)
    if len(names) != new.count(HOLE):
        return new
    parts = new.split(HOLE)
    return "".join(part + name for part, name in zip(parts, [*names, ""], strict=True))
