"""A switch of models needs memory for both: stock keeps the old one until the new one is loaded.

Stock drops the old model first, but a variable of the generation loop still refers to it until the
load is over. Also, freed memory stays in MLX's pool of buffers (0.31.3; from 0.32 stock clears the
pool, to little effect). Here the shim empties the old model, and then the pool, right before the
new model is loaded.
"""

from __future__ import annotations

import gc
import os
import threading
from types import SimpleNamespace
from typing import Any

from ..core import patch, report
from ..core.verdicts import Incompatible, Retired, require
from ..engine.state import engine
from ..probing import dry_run, model_switch
from ..probing.dry_run import Anything

UPSTREAM = "mlx-lm 1757; 1837 cures the pool"
MODULE = "mlx_lm.server"


class _Loading(Exception):
    """The probe has seen what it needs: stock is about to load."""


def _about_to_load(*_: Any, **__: Any) -> Any:
    raise _Loading


def probe(server: Any) -> None:
    """See which model stock's loop still holds when it loads, and whether the pool is cleared."""
    require(
        server,
        "ModelProvider._load",
        "ResponseGenerator._generate",
        "load",
        "sharded_load",
        "mx.clear_cache",
    )
    try:
        held = model_switch.run(server, Anything())
        cleared = _clears_the_pool(server)
    except Exception as error:
        raise Incompatible(f"a model is not loaded in the expected way: {error!r}") from error
    if not held and cleared:
        raise Retired("a model is returned before the next is loaded")


def _clears_the_pool(server: Any) -> bool:
    cleared: list[bool] = []
    mx = SimpleNamespace(clear_cache=lambda: cleared.append(True))
    provider = Anything(is_distributed=False, reset=Anything())
    load = dry_run.of(server.ModelProvider._load, load=_about_to_load, mx=mx, gc=Anything())
    try:
        load(provider, os.devnull)
    except _Loading:
        return bool(cleared)
    raise RuntimeError("ModelProvider._load does not load")


def apply(server: Any) -> None:
    release = _Releasing(server.mx)
    patch.wrap(server, "ModelProvider._load", release.around_switch)
    for load in ("load", "sharded_load"):
        patch.wrap(server, load, release.around_load)


class _Releasing:
    def __init__(self, mx: Any) -> None:
        self.mx = mx
        # .switch: the provider, and the model that it had.
        self.local = threading.local()

    def around_switch(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        # A program that loads models itself may use both, but not in the generation thread.
        # The provider in the probe of another guard has no model.
        former = getattr(instance, "model", None)
        if former is not None and threading.current_thread() is engine.generation_thread:
            self.local.switch = instance, former
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.local.switch = None

    def around_load(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Free the old model at the first load of a switch; a draft model is loaded after it."""
        switch, self.local.switch = getattr(self.local, "switch", None), None
        if switch is not None and switch[0].model is None:
            what = "the weights of the former model stay until the load is over"
            with report.contained(what, report.line):
                # A module is a dict of its weights and of the modules in it.
                switch[1].clear()
                gc.collect()
                self.mx.clear_cache()
        return wrapped(*args, **kwargs)
