"""Makes `python -m mlx_lm.server` run the hooked module.

runpy runs a module as __main__: it asks the module's loader for `get_code`, and imports nothing by
name. So no post-import hook is called (wrapt 238), and patches to an imported copy would miss the
code that runs. Here `get_code` returns code that imports the hooked module and then runs the
module's own `if __name__ == "__main__":` block.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any


class ServerFinder:
    """Finds the server's module through the other finders, and replaces its loader."""

    def __init__(self, name: str, after_import: Callable[[Any], None] | None) -> None:
        self.name = name
        self.after_import = after_import

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        loader: Any = _Loader(spec.loader, self.after_import)
                        spec.loader = loader
                    return spec
        return None


class _Loader:
    """The stock loader, except for `get_code` and `exec_module`."""

    def __init__(self, stock: Any, after_import: Callable[[Any], None] | None) -> None:
        self._stock = stock
        self._after_import = after_import

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def get_code(self, name: str) -> Any:
        """Return the code that runpy runs as __main__.

        In a worker that multiprocessing has spawned it runs as __mp_main__.
        """
        # The source is empty where only byte code is installed.
        tree = ast.parse(self._stock.get_source(name) or "")
        tail = [
            node
            for node in tree.body
            if isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        ]
        code = ast.parse(f"from {name} import *")
        code.body.extend(tail or ast.parse("if __name__ == '__main__': main()").body)
        return compile(code, self._stock.get_filename(name), "exec")

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._stock
        self._stock.exec_module(module)
        if self._after_import is not None:
            self._after_import(module)
