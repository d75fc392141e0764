"""Changes a name of a module, such as a function or a class, in one module of mlx_lm."""

from __future__ import annotations

import ast
import re

from kit.drift import stock_package
from kit.drift.rewriter import Rewriter, renamed
from kit.drift.shapes import own
from kit.drift.stock_package import DEFINITION, Found, Sources


class Globals(Rewriter, ast.NodeTransformer):
    """Changes a name of a module in one module: its own, or one that imports it."""

    def __init__(self, sources: Sources, module: str, found: Found, kind: str) -> None:
        super().__init__(kind, {found.top})
        self.sources, self.module, self.found = sources, module, found
        # Its name in this module; empty until the module imports it.
        self.name = found.top if module == found.home else ""
        self.scopes: list[set[str]] = []
        self.modules = set(stock_package.aliases(sources, module, found.home))

    def class_begins(self, name: str, header: list[str]) -> list[str]:
        self.scopes.append(set())
        if self.shape is not None or not self.name or not any(self.name in line for line in header):
            return header
        self.touched = True
        return [re.sub(rf"\b{self.name}\b", renamed(self.name), line) for line in header]

    def class_ends(self, name: str) -> list[str]:
        self.scopes.pop()
        return []

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if self.found.node is None:
            return self.visit_Import(node)
        for alias in node.names:
            if not self._imports_it(node, alias):
                continue
            self.touched = True
            if self.shape is not None:
                self.name = alias.asname or alias.name
                continue
            if self.scopes:
                alias.asname = alias.asname or alias.name
            elif alias.asname is None:
                self.name = alias.name
            alias.name = renamed(alias.name)
        return node

    def _imports_it(self, node: ast.ImportFrom, alias: ast.alias) -> bool:
        home = stock_package.origin(
            node, self.module, stock_package.is_package(self.sources, self.module)
        )
        found = stock_package.find(self.sources, home, alias.name)
        return found is not None and (found.home, found.top) == (self.found.home, self.found.top)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST:
        for alias in node.names:
            if self.name and (alias.asname or alias.name) == self.name and not self.scopes:
                self.touched = True
                alias.asname = renamed(self.name)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.children(node)
        if self.shape is None and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and part.value == self.found.top:
                    part.value = renamed(self.found.top)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        at_top = not self.scopes and node.name == self.name
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        defaults, node.args.defaults = node.args.defaults, []
        self.scopes.append(self._local(node))
        self.children(node)
        self.scopes.pop()
        node.args.defaults = defaults
        if at_top:
            self.touched = True
            if self.shape is None:
                node.name = renamed(node.name)
            else:
                self.shape.define(node, 0)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not self._means_it(node):
            return node
        self.touched = True
        if self.shape is not None:
            return self.reference(node)
        node.id = renamed(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not self._means_it(node):
            return self.children(node)
        self.touched = True
        if self.shape is not None:
            return self.reference(node)
        node.attr = renamed(node.attr)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self.shape is not None and self._means_it(node.func):
            self.touched = True
            return self.changed_call(node)
        return self.children(node)

    def _means_it(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr == self.found.top and node.value.id in self.modules
        return (
            isinstance(node, ast.Name)
            and node.id == self.name
            and not any(self.name in s for s in self.scopes)
        )

    def _local(self, function: ast.FunctionDef) -> set[str]:
        """The local names of a function, without the changed one where the function imports it."""
        given = function.args
        names = {
            a.arg
            for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
            if a
        }
        for node in own(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, DEFINITION):
                names.add(node.name)
            elif (
                isinstance(node, ast.ImportFrom)
                and self.shape is not None
                and self.found.node is not None
            ):
                names |= {a.asname or a.name for a in node.names if not self._imports_it(node, a)}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        return names
