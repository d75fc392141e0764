"""Makes `python -m mlx_lm.server` take the hooked way in.

runpy runs a module as __main__ by asking its loader for `get_code`; nothing is imported by name, so no post-import
hook fires (wrapt 238), and patches to an imported copy would miss the one that runs. Here `get_code` answers with the
module's own `if __name__ == "__main__":` block over the imported, hooked module.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any


class ServerFinder:
    """Finds the server's module as the other finders do, and gives it a loader that runpy can ask."""

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
                        spec.loader = _Loader(spec.loader, self.after_import)  # type: ignore[assignment]
                    return spec
        return None


class _Loader:
    """The stock loader, but for the two methods below."""

    def __init__(self, stock: Any, after_import: Callable[[Any], None] | None) -> None:
        self._stock = stock
        self._after_import = after_import

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def get_code(self, name: str) -> Any:
        """What runpy runs as __main__ (or as __mp_main__, in a worker that multiprocessing spawned)."""
        tree = ast.parse(
            self._stock.get_source(name) or ""
        )  # empty where only byte code is installed
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
