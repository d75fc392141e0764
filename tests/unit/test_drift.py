"""tests/process/test_drift.py changes stock exactly as it says, and the sources compile."""

from __future__ import annotations

import re
import textwrap
from typing import ClassVar

import pytest

from kit.drift import mutate, names, stock_package
from kit.drift.cases import cases, touched
from kit.drift.server import package_of

SOURCES = {
    "mlx_lm": "from .engine import Engine\n__all__ = ['Engine', 'help']\nfrom .tools import help\n",
    "mlx_lm.tools": "def help(a, b=1):\n    return a + b\n",
    "mlx_lm.engine": textwrap.dedent('''
        """Kept as it is written."""
        from queue import Queue
        from threading import Thread
        from . import tools
        from .tools import help

        class Base:
            def close(self):
                return "base"

        class Engine(Base):
            limit: int = 3

            def __init__(self, n):
                self.n, self.queue = n, Queue()
                self.thread = Thread(target=self.work)  # a comment

            def work(self):
                if self.n:
                    return help(self.n) + tools.help(1)
                return None

            def close(self):
                return super().close() + "engine"

        def use(file, help=None):
            engine = Engine(2)
            file.close()
            closed = [e.close() for e in (engine, Base())]
            return engine.work(), engine.close(), closed, hasattr(engine, "work")
    '''),
}


class File:
    closed: ClassVar[list[int]] = []

    def close(self):
        self.closed.append(1)


def run(sources, monkeypatch):
    """The answer of `use`, after the thread has run too."""
    import importlib.util
    import sys
    from importlib.abc import Loader, MetaPathFinder

    class Finder(MetaPathFinder, Loader):
        def find_spec(self, name, path=None, target=None):
            if name in sources:
                return importlib.util.spec_from_loader(name, self, is_package=name == "mlx_lm")
            return None

        def exec_module(self, module):
            exec(compile(sources[module.__name__], module.__name__, "exec"), vars(module))

    for name in [n for n in sys.modules if n.split(".")[0] == "mlx_lm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "drift_names", names)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    try:
        engine = importlib.import_module("mlx_lm.engine")
        made = getattr(engine, "Engine", None) or engine.Engine_renamed
        thread = (
            made(names.EXTRA, 0) if "drift_extra, n" in sources["mlx_lm.engine"] else made(0)
        ).thread
        thread.start()
        thread.join()
        return engine.use(File())
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "mlx_lm"]:
            del sys.modules[name]


NAMES = [
    ("mlx_lm.engine", path)
    for path in (
        "Engine",
        "Engine.__init__",
        "Engine.work",
        "Engine.close",
        "Engine.queue",
        "Engine.limit",
        "help",
        "Queue",
    )
]


@pytest.mark.parametrize(
    "case", [case for case in cases(NAMES, mutate.KINDS) if mutate.mutate(SOURCES, *case)], ids=str
)
def test_what_is_changed_does_the_same(case, monkeypatch):
    changed = mutate.mutate(SOURCES, *case)
    stock = run(SOURCES, monkeypatch)
    assert stock == (5, "baseengine", ["baseengine", "base"], True)
    assert run(SOURCES | changed, monkeypatch) == stock


def test_what_makes_no_sense():
    nonsense = {
        (path, kind)
        for _, path in NAMES
        for kind in mutate.KINDS
        if mutate.mutate(SOURCES, "mlx_lm.engine", mutate.subject(path, kind), kind) is None
    }
    others = {"extra argument", "other result", "generator"}
    assert nonsense == (
        {
            (path, kind)
            for path in ("Engine", "Engine.queue", "Engine.limit", "Queue")
            for kind in others
        }
        | {("Queue", "moved")}
        | {("Engine.__init__", kind) for kind in ("renamed", "other result", "generator")}
    )
    assert mutate.mutate(SOURCES, "mlx_lm.engine", "Engine.none", "renamed") is None
    assert mutate.mutate(SOURCES, "mlx_lm.none", "x", "renamed") is None


def test_a_renamed_name_is_nowhere_left_and_all_else_is_as_written():
    changed = mutate.mutate(SOURCES, "mlx_lm.engine", "help", "renamed")
    assert set(changed) == {"mlx_lm", "mlx_lm.tools", "mlx_lm.engine"}
    assert "'help'" not in changed["mlx_lm"]
    left = re.findall(r"\bhelp\b", changed["mlx_lm.engine"])
    assert left == ["help"], "the argument of `use` is another thing"
    assert "# a comment" in changed["mlx_lm.engine"]


@pytest.mark.parametrize("line", ["0.31.3", "0.32.2"])
def test_every_change_of_stock_compiles(line, tmp_path):
    sources = stock_package.read(package_of(line))
    made = 0
    for module, path, kind in cases(touched(line, tmp_path), mutate.KINDS):
        changed = mutate.mutate(sources, module, path, kind)
        for name, source in (changed or {}).items():
            compile(source, name, "exec")
            assert source != sources.get(name)
        made += changed is not None
    assert made > 200
