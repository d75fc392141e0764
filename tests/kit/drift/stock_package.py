"""Reads the sources of a mlx_lm for tests/kit/drift/mutate.py.

It tells which modules the server needs, and what a dotted path means.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

# By the name of the module.
Sources = dict[str, str]
ROOTS = ("mlx_lm", "mlx_lm.cli", "mlx_lm.server", "mlx_lm.models.llama")
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def parse(source: str) -> ast.Module:
    """Parse the source. The caller must not change the tree."""
    return ast.parse(source)


def read(package: Path) -> Sources:
    """The modules of the package in that folder that the server of a tiny llama needs."""
    sources: Sources = {}
    wanted = list(ROOTS)
    while wanted:
        module = wanted.pop()
        path = file_of(package.parent, module)
        if module not in sources and path.is_file():
            sources[module] = path.read_text()
            wanted += _needs(sources[module], module, path.name == "__init__.py")
    return sources


def is_package(sources: Sources, module: str) -> bool:
    return any(name.startswith(f"{module}.") for name in sources)


def file_of(folder: Path, module: str) -> Path:
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _needs(source: str, module: str, package: bool) -> Iterator[str]:
    """The modules of mlx_lm from which the source imports, at any place."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.ImportFrom):
            home = origin(node, module, package)
            if home.split(".")[0] == "mlx_lm":
                yield home
                # An imported name may be a module itself.
                yield from (f"{home}.{alias.name}" for alias in node.names)


def origin(node: ast.ImportFrom, module: str, package: bool = False) -> str:
    """The full name of the module from which the statement imports."""
    if not node.level:
        return node.module or ""
    parents = module.split(".")
    parents = parents[: len(parents) - node.level + package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def aliases(sources: Sources, module: str, home: str) -> Iterator[str]:
    """The names under which a module has imported the whole module `home`."""
    for node in parse(sources[module]).body:
        if isinstance(node, ast.ImportFrom):
            parent = origin(node, module, is_package(sources, module))
            yield from (a.asname or a.name for a in node.names if f"{parent}.{a.name}" == home)
        elif isinstance(node, ast.Import):
            yield from (a.asname for a in node.names if a.name == home and a.asname)


@dataclass
class Found:
    """The meaning of a dotted path: a member of a class, or a name of a module."""

    # The module that defines it.
    home: str
    # Its name there, or the name of its class.
    top: str
    member: str | None
    # The definition of `top`; None where the name comes from outside of mlx_lm.
    node: ast.stmt | None


def find(sources: Sources, module: str, path: str) -> Found | None:
    """Find the thing. None: the sources do not have it, or it is deeper than a class member."""
    top, _, rest = path.partition(".")
    for node in parse(sources[module]).body if module in sources else ():
        if isinstance(node, DEFINITION) and node.name == top:
            deeper = rest and not (isinstance(node, ast.ClassDef) and "." not in rest)
            return None if deeper else Found(module, top, rest or None, node)
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == top for t in node.targets
        ):
            return None if rest else Found(module, top, None, node)
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) == top:
                    return _resolve_import(sources, module, node, alias, rest)
    return None


def _resolve_import(
    sources: Sources, module: str, node: ast.Import | ast.ImportFrom, alias: ast.alias, rest: str
) -> Found | None:
    """The meaning of an imported name, or of a member of it."""
    home = (
        origin(node, module, is_package(sources, module))
        if isinstance(node, ast.ImportFrom)
        else ""
    )
    if home in sources and home != module:
        return find(sources, home, f"{alias.name}.{rest}" if rest else alias.name)
    return Found(module, alias.asname or alias.name, None, None)


@functools.cache
def _classes(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in parse(source).body if isinstance(node, ast.ClassDef)}


@dataclass
class Family:
    """The classes that have a member in common, each as (module, class)."""

    # Those that define the member, and do not inherit it from a class of mlx_lm.
    roots: set[tuple[str, str]]
    everybody: set[tuple[str, str]]
    definitions: list[ast.AST]


def family(sources: Sources, home: str, top: str, member: str) -> Family:
    """The family of the class `top`; without roots where no class of mlx_lm defines the member."""
    above = _ancestors(sources, home, top)
    definers = {(m, c) for m, c in above if member in members(_classes(sources[m])[c])}
    roots = {
        (m, c) for m, c in definers if not (set(_ancestors(sources, m, c)) - {(m, c)}) & definers
    }
    everybody = {
        (m, c)
        for m in sources
        for c in _classes(sources[m])
        if set(_ancestors(sources, m, c)) & roots
    }
    found = [members(_classes(sources[m])[c]).get(member) for m, c in sorted(everybody)]
    return Family(roots, everybody, [node for node in found if node is not None])


def _ancestors(sources: Sources, module: str, name: str) -> list[tuple[str, str]]:
    """The class itself, and the classes of mlx_lm that it inherits from."""
    node = _classes(sources[module]).get(name)
    if node is None:
        return []
    result = [(module, name)]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id != name:
            found = find(sources, module, base.id)
            if found is not None and isinstance(found.node, ast.ClassDef):
                result += _ancestors(sources, found.home, found.top)
    return result


@functools.cache
def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """The members that a class defines: methods, fields, classes, attributes set on self."""
    stored = [
        p for p in ast.walk(node) if isinstance(p, ast.Attribute) and isinstance(p.ctx, ast.Store)
    ]
    found: dict[str, ast.AST] = {
        p.attr: p for p in stored if isinstance(p.value, ast.Name) and p.value.id == "self"
    }
    for part in node.body:
        if isinstance(part, DEFINITION):
            found[part.name] = part
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        found |= {target.id: part for target in targets if isinstance(target, ast.Name)}
    return found


def dictated(sources: Sources, home: str, top: str, member: str) -> bool:
    """Whether http.server calls the member by this name, in this way."""
    bases = [b for m, c in _ancestors(sources, home, top) for b in _classes(sources[m])[c].bases]
    handles = any(
        isinstance(b, ast.Name) and b.id == BaseHTTPRequestHandler.__name__ for b in bases
    )
    ours = member.startswith("do_") or (
        hasattr(BaseHTTPRequestHandler, member) and member != "__init__"
    )
    return handles and ours
