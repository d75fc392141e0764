"""Changes a name of stock throughout the sources of mlx_lm, like a release may.

The changed server must serve as before. `mutate` returns the changed sources, or None where such a
change makes no sense for the name. The changed sources need tests/kit/drift/names.py next to the
package.
"""

from __future__ import annotations

import ast

from kit.drift import shapes, stock_package
from kit.drift.globals import Globals
from kit.drift.members import Members
from kit.drift.stock_package import FUNCTION, Found, Sources

KINDS = ("renamed", "extra argument", "other result", "generator", "moved")


def mutate(sources: Sources, module: str, path: str, kind: str) -> Sources | None:
    """Make the change to the thing that `path` means in `module`. Returns the changed modules."""
    found = stock_package.find(sources, module, path)
    if found is None:
        return None
    # The console script and mlx_lm.cli call it by this name.
    if found.home.endswith(".server") and found.top == "main":
        return None
    if kind == "moved":
        return None if found.member else _move(sources, found)
    return (
        _change_name(sources, found, kind)
        if found.member is None
        else _change_member(sources, found, kind)
    )


def subject(path: str, kind: str) -> str:
    """The path of the thing to change: a method moves with its class."""
    return path.partition(".")[0] if kind == "moved" else path


def _change_member(sources: Sources, found: Found, kind: str) -> Sources | None:
    member = str(found.member)
    family = stock_package.family(sources, found.home, found.top, member)
    if not family.roots or stock_package.dictated(sources, found.home, found.top, member):
        return None
    if kind == "renamed":
        if member.startswith("__"):
            return None
    elif not all(_can_change(node, kind) for node in family.definitions):
        return None
    names = {name for _, name in family.everybody}
    changed = {}
    for module, source in sources.items():
        if member in source and (member != "__init__" or any(name in source for name in names)):
            new = Members(module, family, member, kind).rewrite(source)
            if new is not None:
                changed[module] = new
    return changed


def _change_name(sources: Sources, found: Found, kind: str) -> Sources | None:
    if kind != "renamed" and (
        not isinstance(found.node, FUNCTION) or not _can_change(found.node, kind)
    ):
        return None
    changed = {}
    for module, source in sources.items():
        if found.top in source:
            new = Globals(sources, module, found, kind).rewrite(source)
            if new is not None:
                changed[module] = new
    return changed


def _can_change(node: ast.AST, kind: str) -> bool:
    """Whether a definition is a plain function, which can have another shape."""
    if not isinstance(node, ast.FunctionDef):
        return False
    special = node.name.startswith("__")
    if {ast.unparse(d) for d in node.decorator_list} - {"classmethod", "staticmethod"}:
        return False
    if kind == "extra argument":
        return not special or node.name == "__init__"
    return not special and not shapes.yields(node)


def _move(sources: Sources, found: Found) -> Sources | None:
    """Put the definition into a new module with its own globals, and import it back from there."""
    home = ast.parse(sources[found.home])
    place = next(
        (n for n, s in enumerate(home.body) if getattr(s, "name", None) == found.top), None
    )
    if place is None:
        return None
    node = home.body[place]
    # It would set globals of the new module, which no code reads.
    if any(isinstance(part, ast.Global) for part in ast.walk(node)):
        return None
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {found.top}
    above = sorted(used & _defined(home.body[:place]))
    below = sorted(used & _defined(home.body[place + 1 :]))
    last = found.home.rpartition(".")[2]
    new = f"{last}_moved"
    future = [s for s in home.body if _is_future(s)]
    imports = [
        s for s in home.body if isinstance(s, ast.Import | ast.ImportFrom) and not _is_future(s)
    ]
    package = (
        found.home
        if stock_package.is_package(sources, found.home)
        else found.home.rpartition(".")[0]
    )
    # The name of the old module in the new one.
    itself = None if package == found.home else last
    back = [ast.ImportFrom(itself, [ast.alias(name) for name in above], 1)] if above else []
    moved = ast.Module([*future, *imports, *back, node], [])
    home.body[place] = ast.ImportFrom(new, [ast.alias(found.top)], 1)
    # The names below do not exist yet when the new module is imported.
    if below:
        home.body.append(ast.ImportFrom(None, [ast.alias(new)], 1))
        home.body += [ast.parse(f"{new}.{name} = {name}").body[0] for name in below]
    return {found.home: ast.unparse(home), f"{package}.{new}": ast.unparse(moved)}


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _defined(statements: list[ast.stmt]) -> set[str]:
    """The names of a module that these statements define, without imports."""
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, stock_package.DEFINITION):
            names.add(statement.name)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            stored = [
                p
                for p in ast.walk(statement)
                if isinstance(p, ast.Name) and isinstance(p.ctx, ast.Store)
            ]
            names |= {part.id for part in stored}
    return names
