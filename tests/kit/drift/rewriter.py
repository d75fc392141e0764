"""Rewrites one module of mlx_lm for tests/kit/drift/mutate.py. Other statements stay as written."""

from __future__ import annotations

import ast

from kit.drift import stock_package
from kit.drift.shapes import HELPER, SHAPES, helped


def renamed(name: str) -> str:
    return f"{name}_renamed"


class Rewriter(ast.NodeTransformer):
    """Parses and rewrites only the statements that contain one of the words."""

    def __init__(self, kind: str, words: set[str]) -> None:
        # None: the change is a new name.
        self.shape = SHAPES.get(kind)
        self.words = words
        self.touched = False

    def rewrite(self, source: str) -> str | None:
        """The new source of the module, or None where nothing changes."""
        tree, lines = stock_package.parse(source), source.splitlines()
        first = next(
            n for n, statement in enumerate(tree.body) if not _has_to_be_first(n, statement)
        )
        result: list[str] = []
        done = 0
        for n, statement in enumerate(tree.body):
            begin, end = _begin(statement), statement.end_lineno or 0
            result += lines[done:begin]
            result += [f"import {HELPER}"] if n == first else []
            done = end
            part = lines[begin:end]
            if isinstance(statement, ast.ClassDef) and statement.body[0].lineno > statement.lineno:
                result += self._of_class(statement, part, begin)
            else:
                result += self._of_statement(part)
        result += lines[done:]
        return "\n".join(result) + "\n" if self.touched else None

    def _of_statement(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        return (
            ast.unparse(self.visit(ast.parse(text))).splitlines() if self._concerns(text) else lines
        )

    def _of_class(self, node: ast.ClassDef, lines: list[str], offset: int) -> list[str]:
        """The new lines of a class at the top of the module, which begins at the line `offset`."""
        done = _begin(node.body[0]) - offset
        result = self.class_begins(node.name, lines[:done])
        for statement in node.body:
            begin, end = _begin(statement) - offset, (statement.end_lineno or 0) - offset
            result += lines[done:begin]
            done = end
            text = "\n".join(["class _:", *lines[begin:end]])
            if self._concerns(text):
                whole = ast.parse(text)
                whole.body[0].body = [self.visit(part) for part in whole.body[0].body]
                result += ast.unparse(whole).strip("\n").splitlines()[1:]
            else:
                result += lines[begin:end]
        return result + self.class_ends(node.name)

    def _concerns(self, text: str) -> bool:
        return any(word in text for word in self.words)

    def children(self, node: ast.AST) -> ast.AST:
        return self.generic_visit(node)

    def reference(self, node: ast.expr) -> ast.expr:
        """A reference to the function, replaced by a function that is called as before."""
        return helped(self.shape.reference, node, ast.Constant(True))

    def changed_call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(a) for a in node.args]
        node.keywords = [self.visit(k) for k in node.keywords]
        return self.shape.call(node)


def _has_to_be_first(n: int, statement: ast.stmt) -> bool:
    """Whether it is the docstring of a module, or an import from the future."""
    future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    return future or (
        n == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _begin(statement: ast.stmt) -> int:
    """The index of its first line, which may be a decorator."""
    return (
        min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]) - 1
    )
