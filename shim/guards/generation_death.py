"""The generation thread dies and the process stays, a zombie: the port answers, nothing is ever generated.

mlx-lm 0.31.3 runs `_generate` as the thread's target, so threading.excepthook sees the death; from 0.32 a wrapper
swallows the exception and sets a flag. Either way the process never exits, and no supervisor restarts it. Here the
dying thread itself ends the process: 70 once the model had come up, 78 when it never did, so that a supervisor can
tell a crash from a typing error.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any, NoReturn

from .. import fatal, patch, report
from ..engine import engine
from . import require

UPSTREAM = "mlx-lm 1505, 1514, 1791, 1909"
MODULE = "mlx_lm.server"


def probe(server: Any) -> None:
    require(server, "ResponseGenerator._generate", "ResponseGenerator.stop_and_join", "ModelProvider.load_default")


def apply(server: Any) -> None:
    patch.wrap(server, "ResponseGenerator._generate", _generate)
    if hasattr(server.ResponseGenerator, "_run_generate"):
        patch.wrap(server, "ResponseGenerator._run_generate", _run_generate)
    threading.excepthook = _Hook(threading.excepthook)


def _generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around the thread's whole life. Ends the process here, in that thread, whoever catches what outside."""
    engine.attach(instance)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        if instance._stop:
            raise  # an orderly stop is under way: what goes wrong in it is the stock server's to show
        _die(error)
    if not instance._stop:
        _die(None)
    return result


def _run_generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around what swallows the exception, for a subclass that has a `_generate` of its own."""
    engine.attach(instance)
    result = wrapped(*args, **kwargs)
    if not instance._stop:
        _die(None)
    return result


class _Hook:
    """A threading.excepthook for deaths that bypass the wrappers."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, args: Any) -> None:
        if fatal.begun() or engine.stopping or not _is_generation(args):
            self.previous(args)
        else:
            _die(args.exc_value, lambda: self.previous(args))


def _is_generation(args: Any) -> bool:
    """By identity, then by the loop's own frame. Never by the thread's name: other programs use those names too."""
    if any(args.thread is getattr(generator, "_generation_thread", engine) for generator in engine.generators):
        return True
    return any(_is_loop(frame.f_code) for frame, _ in traceback.walk_tb(args.exc_traceback))


def _is_loop(code: Any) -> bool:
    """Whether `code` is the generation loop of mlx_lm/server.py, and no namesake in somebody else's server.py."""
    server = sys.modules.get(MODULE)
    named = code.co_name in ("_generate", "_run_generate")
    return named and server is not None and code.co_filename == getattr(server, "__file__", None)


def _die(error: BaseException | None, show: Any = None) -> NoReturn:
    what = "its loop returned" if error is None else f"{type(error).__name__}: {report.one_line(error)}"
    if engine.draining and engine.rank:  # all were asked to stop, and rank 0 has gone first
        fatal.stop(fatal.STOPPED, f"rank {engine.rank} has nobody left to work with: {what}")
    if engine.booting:
        status, reason = fatal.EX_CONFIG, f"the model {engine.model_name} could not be loaded: {what}"
    else:
        status, reason = fatal.EX_SOFTWARE, f"the generation thread died: {what}"
    if show is None and error is not None:
        show = lambda: _show(error)  # noqa: E731
    fatal.end(status, reason, show, error)


def _show(error: BaseException) -> None:
    """The traceback, through whichever hook is in place by now (a crash reporter's, say), as if nobody had caught it."""
    if isinstance(error, SystemExit):  # which the hooks pass over in silence
        traceback.print_exception(error)
        return
    try:
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
        )
    except BaseException as broken:
        report.line(f"threading.excepthook itself failed: {broken!r}")
        traceback.print_exception(error)
    if sys.stderr is not None:
        sys.stderr.flush()
