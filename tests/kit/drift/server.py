"""Starts stock servers whose sources were changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from kit.drift.stock_package import Sources, file_of
from kit.harness import REPO, VENVS, Server, wait_until

READY = 30.0
HERE = Path(__file__).parent


def package_of(line: str) -> Path:
    """The folder of mlx_lm of a line."""
    return next((VENVS / line / "lib").glob("python*/site-packages/mlx_lm"))


def lay_out(folder: Path, package: Path, changed: Sources) -> Path:
    """Put an mlx_lm into `folder`: the changed modules as given, the rest as links to stock."""
    shutil.copy(HERE / "names.py", folder / "drift_names.py")
    for module, source in changed.items():
        path = file_of(folder, module) if "." in module else folder / module / "__init__.py"
        if (package.parent / path.relative_to(folder).with_suffix("") / "__init__.py").is_file():
            # A package that is not laid out yet.
            path = path.with_suffix("") / "__init__.py"
        for parent in reversed(path.relative_to(folder).parents[:-1]):
            (folder / parent).mkdir(exist_ok=True)
        path.write_text(source)
    _link(folder / package.name, package, {file_of(folder, module) for module in changed})
    return folder


def _link(folder: Path, stock: Path, changed: set[Path]) -> None:
    folder.mkdir(exist_ok=True)
    for item in stock.iterdir():
        ours = folder / item.name
        if item.name == "__pycache__":
            stale = {path.stem for path in changed if path.parent == folder}
            ours.mkdir()
            for compiled in item.iterdir():
                if compiled.name.partition(".")[0] not in stale:
                    (ours / compiled.name).symlink_to(compiled)
        elif ours.is_dir():
            _link(ours, item, changed)
        elif ours not in changed:
            ours.symlink_to(item)


class Drifted(Server):
    """The server of a line over the mlx_lm in `folder` (None: stock's)."""

    def __init__(
        self,
        line: str,
        folder: Path | None,
        model: Path,
        log: Path,
        *,
        args: tuple[str, ...] = (),
        environ: dict[str, str | None] | None = None,
    ) -> None:
        path = [REPO, *([folder] if folder is not None else [])]
        environ = (environ or {}) | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        super().__init__(line, model, log, args=args, environ=environ, bytecode=False)

    def ready(self) -> Drifted:
        """Give up sooner than with other servers: it is up within a second, or never."""
        assert wait_until(self._answers, READY), f"never answered; its log:\n{self.text()[-3000:]}"
        return self

    def post(
        self, body: Any, path: str = "/v1/completions", timeout: float = READY
    ) -> tuple[int, Any]:
        return super().post(body, path, timeout)
