"""Changes a member of a class in one module of mlx_lm."""

from __future__ import annotations

import ast

from kit.drift import stock_package
from kit.drift.rewriter import Rewriter, renamed
from kit.drift.shapes import helped, helper, is_thread

# The names under which mlx_lm calls a class that it gets as an argument.
GIVEN_CLASSES = ("cls", "handler_class", "server_class")
BY_NAME = ("hasattr", "getattr", "setattr", "delattr")


class Members(Rewriter, ast.NodeTransformer):
    """Changes a member of a class: its definition, and its uses through objects of the class."""

    def __init__(self, module: str, family: stock_package.Family, member: str, kind: str) -> None:
        # All of mlx_lm imports the classes under these names.
        names = {name for _, name in family.everybody}
        super().__init__(
            kind, {member} | ({*names, *GIVEN_CLASSES} if member == "__init__" else set())
        )
        self.member, self.names = member, names
        self.ours = {name for home, name in family.everybody if home == module}
        self.roots = {name for home, name in family.roots if home == module}
        # The top-level class that the visitor is in.
        self.top = ""
        self.functions = 0

    @property
    def inside(self) -> bool:
        return self.top in self.ours

    @property
    def in_class_body(self) -> bool:
        return self.inside and not self.functions

    def class_begins(self, name: str, header: list[str]) -> list[str]:
        self.top = name
        return header

    def class_ends(self, name: str) -> list[str]:
        self.top = ""
        if name not in self.roots:
            return []
        self.touched = True
        return [f"    _drift_{self.member} = True"]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """A class within a class, or within a function."""
        if self.in_class_body and self.shape is None and node.name == self.member:
            self.touched, node.name = True, renamed(node.name)
        return self.children(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        ours = self.in_class_body and node.name == self.member
        self.functions += 1
        self.children(node)
        self.functions -= 1
        if not ours:
            return node
        self.touched = True
        if self.shape is None:
            node.name = renamed(node.name)
        else:
            static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
            self.shape.define(node, 0 if static else 1)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self.shape is None and self.in_class_body and node.id == self.member:
            # A field or a decorator.
            node.id = renamed(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.children(node)
        known = self._is_ours(node.value)
        if node.attr != self.member or known is False:
            return node
        if self.shape is not None and not isinstance(node.ctx, ast.Load):
            return node
        self.touched = True
        if self.shape is not None:
            how = helper(self.shape.reference)
            return (
                self.reference(node)
                if known
                else helped("bound", how, node.value, ast.Constant(self.member))
            )
        if known:
            node.attr = renamed(node.attr)
            return node
        return ast.Attribute(
            helped("Slot", node.value, ast.Constant(self.member)), "value", node.ctx
        )

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if self.shape is not None:
            if self._is_member(function):
                self.touched = True
                return self.changed_call(node)
            target = next((k for k in node.keywords if k.arg == "target"), None)
            if is_thread(node) and target is not None and self._is_member(target.value):
                self.touched = True
                self.shape.thread(node, target)
                return node
        self.children(node)
        if not isinstance(function, ast.Name):
            return node
        if self.shape is None:
            return self._named_in(node, function.id)
        if self.member == "__init__" and function.id in self.names:
            self.touched = True
            return self.shape.call(node)
        if self.member == "__init__" and function.id in GIVEN_CLASSES:
            marked = helped("marked", function, ast.Constant(self.member))
            node.func = helped(self.shape.reference, function, marked)
        return node

    def _named_in(self, node: ast.Call, function: str) -> ast.AST:
        """A call that holds the name as a string, or as a keyword for a field of a dataclass."""
        if (
            function in BY_NAME
            and isinstance(node.args[1], ast.Constant)
            and node.args[1].value == self.member
        ):
            self.touched = True
            return ast.Call(helper("by_name"), [node.func, *node.args], node.keywords)
        for keyword in node.keywords if function in self.names else ():
            if keyword.arg == self.member:
                self.touched, keyword.arg = True, renamed(self.member)
        return node

    def _is_member(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == self.member
            and self._is_ours(node.value) is True
        )

    def _is_ours(self, value: ast.expr) -> bool | None:
        """Whether it is of the family. None: only the run time can tell."""
        return self.inside if isinstance(value, ast.Name) and value.id == "self" else None
