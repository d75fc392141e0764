"""Shows a probe what stock's generation loop holds when a request names another model.

No model is loaded.
"""

from __future__ import annotations

import weakref
from typing import Any

from . import dry_run
from .dry_run import Anything


class Model:
    """Stands for a model."""


class _Over(Exception):
    """The loop goes on although it was told to stop."""


class _Provider(Anything):
    """Stands for a ModelProvider that has two models to load, one after the other."""

    def __init__(self) -> None:
        super().__init__(loaded=[], held=False, model_key=None)

    def load(self, name: str, *_: Any) -> tuple[Model, Any]:
        self.held = any(model() is not None for model in self.loaded)
        self.model_key = (name, None, None)
        model = Model()
        self.loaded.append(weakref.ref(model))
        return model, Anything()


class _Generator:
    """Stands for a ResponseGenerator that serves two requests, each alone."""

    _is_distributed = False
    _rank = 0

    def __init__(self, prompt_cache: Any) -> None:
        self.prompt_cache = prompt_cache
        self.model_provider = _Provider()
        self._stop = False
        self._names = ["first", "second"]

    def _next_request(self, timeout: float | None = None) -> Any:
        if self._stop:
            raise _Over
        if not self._names:
            self._stop = True
            return None
        description = Anything(model=self._names.pop(0), adapter=None, draft=None)
        return Anything(), Anything(messages=[]), Anything(model=description, seed=0)

    def _is_batchable(self, _: Any) -> bool:
        return False

    def _serve_single(self, *_: Any) -> None:
        pass


def run(server: Any, prompt_cache: Any) -> bool:
    """Whether stock's loop still holds the first model when it loads the second.

    It makes the loop load ("first", None, None) and then ("second", None, None). A loop that works
    in another way may raise any exception.
    """
    generator = _Generator(prompt_cache)
    loop = dry_run.of(
        server.ResponseGenerator._generate, mx=Anything(), gc=Anything(), logging=Anything()
    )
    loop(generator)
    if len(generator.model_provider.loaded) != 2:  # noqa: PLR2004
        raise RuntimeError("it has not loaded two models")
    return bool(generator.model_provider.held)
