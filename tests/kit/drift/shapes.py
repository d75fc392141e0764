"""The other shapes of a function: how its definition, its calls and other references change."""

from __future__ import annotations

import ast
from collections.abc import Iterator

HELPER = "drift_names"


def helper(name: str) -> ast.expr:
    """A name of tests/kit/drift/names.py."""
    return ast.Attribute(ast.Name(HELPER, ast.Load()), name, ast.Load())


def helped(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(helper(name), list(args), [])


def own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function. A function or class within it comes as one node."""
    waiting = list(getattr(function, "body", []))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def yields(function: ast.AST) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in own(function))


def is_thread(node: ast.Call) -> bool:
    return (
        node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    ) == "Thread"


class ExtraArgument:
    """A further required argument comes first."""

    reference = "extra"

    @staticmethod
    def define(function: ast.FunctionDef, after: int) -> None:
        function.args.args.insert(after, ast.arg("drift_extra"))

    @staticmethod
    def call(node: ast.Call) -> ast.expr:
        node.args.insert(0, helper("EXTRA"))
        return node

    @staticmethod
    def thread(node: ast.Call, target: ast.keyword) -> None:
        given = next((k for k in node.keywords if k.arg == "args"), None)
        if given is None:
            node.keywords.append(ast.keyword("args", ast.Tuple([helper("EXTRA")], ast.Load())))
        else:
            given.value = ast.BinOp(
                ast.Tuple([helper("EXTRA")], ast.Load()), ast.Add(), given.value
            )


class OtherResult:
    """The result comes in a tuple of one, which has its own class."""

    reference = "opening"

    @staticmethod
    def define(function: ast.FunctionDef, after: int) -> None:
        _Returns(lambda value: [ast.Return(helped("Result", value))]).all_of(function)
        function.body.append(ast.Return(helped("Result", ast.Constant(None))))

    @staticmethod
    def call(node: ast.Call) -> ast.expr:
        return ast.Attribute(node, "value", ast.Load())

    @staticmethod
    def thread(node: ast.Call, target: ast.keyword) -> None:
        """A thread drops the result."""


class Generator:
    """The function yields its result, once."""

    reference = "taking"

    @staticmethod
    def define(function: ast.FunctionDef, after: int) -> None:
        _Returns(lambda value: [ast.Expr(ast.Yield(value)), ast.Return(None)]).all_of(function)
        function.body.append(ast.Expr(ast.Yield(ast.Constant(None))))

    @staticmethod
    def call(node: ast.Call) -> ast.expr:
        return ast.Call(ast.Name("next", ast.Load()), [node], [])

    @staticmethod
    def thread(node: ast.Call, target: ast.keyword) -> None:
        nothing = ast.arguments([], [], None, [], [], None, [])
        target.value = ast.Lambda(nothing, Generator.call(ast.Call(target.value, [], [])))


SHAPES = {"extra argument": ExtraArgument, "other result": OtherResult, "generator": Generator}


class _Returns(ast.NodeTransformer):
    """Replaces each `return` of a function, but not those of functions within it."""

    def __init__(self, instead) -> None:
        self.instead = instead

    def all_of(self, function: ast.FunctionDef) -> None:
        function.body = [new for old in function.body for new in self._statements(self.visit(old))]

    @staticmethod
    def _statements(visited) -> list[ast.stmt]:
        return visited if isinstance(visited, list) else [visited]

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return self.instead(node.value or ast.Constant(None))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef  # noqa: N815
