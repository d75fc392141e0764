"""The generation thread dies and the process stays: it answers, but generates nothing.

mlx-lm 0.31.3 runs `_generate` as the thread's target, so threading.excepthook sees the death.
From 0.32 on a wrapper catches the exception and sets a flag. In both the process never exits, and
no supervisor restarts it. Here the process ends. The status is 78 where the model of --model
never loaded, so that a supervisor can tell a typing error from a crash, and 70 otherwise.

The guard sees a death in four ways. Each needs less of stock than the one before:

* a wrapper around the loop, in the dying thread;
* threading.excepthook, for the thread that a generator started;
* threading.excepthook, for any thread that was started for the loop's function;
* the watchdog, for a generation thread that is gone.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any, NoReturn

from ..core import patch, report, verdicts
from ..engine import anatomy, facts, fatal, trial, watchdog
from ..engine.state import engine

UPSTREAM = "mlx-lm 1505, 1514, 1791, 1909"
MODULE = "mlx_lm.server"
LIVES_BY = {
    "asked to stop": "a thread that ends counts as a death while the server accepts connections",
    ("boot", "turns"): "a model that cannot be loaded at start ends it with 70, not 78",
}

# Stock's functions in which the loop runs, innermost first.
LOOPS = ("ResponseGenerator._generate", "ResponseGenerator._run_generate")
_NAMES = tuple(path.rpartition(".")[2] for path in LOOPS)


def probe(server: Any) -> str:
    """Let a copy of stock's loop die, and see which way notices. Returns what is lost."""
    told: list[str] = []

    def looping(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except BaseException:
            told.append("loop")
            return None

    died = trial.try_death(
        server, lambda copy: _wrap_loops(copy, looping), lambda _: told.append("hook")
    )
    if told or not died:
        return ""
    return "in a trial only the watchdog saw the death: told within a second, without its reason"


def apply(server: Any) -> None:
    facts.watch("loop", lambda: _watch_loop(server))
    threading.excepthook = _Hook(threading.excepthook)
    watchdog.add(_look)


def _wrap_loops(server: Any, wrapper: patch.Wrapper) -> list[str]:
    return [path for path in LOOPS if patch.try_wrap(server, path, wrapper)]


def _watch_loop(server: Any) -> None:
    if not _wrap_loops(server, _looping):
        raise verdicts.Incompatible(f"{server.__name__} has neither {' nor '.join(LOOPS)}")


def _looping(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Runs around the loop for the thread's whole life, and ends the process in that thread.

    It does so here, inside stock's functions: what stock catches outside makes no difference.
    """
    engine.attach(instance)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        if anatomy.is_asked_to_stop(instance):
            # During an orderly stop stock shows what goes wrong.
            raise
        _die(error)
    if _is_no_stop(instance):
        _die(None)
    return result


def _is_no_stop(generator: Any) -> bool:
    """Whether a loop ended without being asked to.

    Where that cannot be seen: whether the server still accepts connections.
    """
    if anatomy.is_asked_to_stop(generator):
        return False
    if not anatomy.is_stock(generator) and anatomy.read(generator, "_generation_failed") is False:
        # A program's own loop, which ends as the program likes: stock caught nothing.
        return False
    return facts.has("asked to stop") or anatomy.is_serving()


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
    """Whether the thread that died generated: by its identity, then by stock's frames.

    Never by the thread's name: other programs use those names too.
    """
    # None where a program calls the hook itself.
    thread = args.thread
    generation = [engine.generating, *map(anatomy.thread_of, engine.living())]
    if thread is not None and any(thread is known for known in generation):
        return True
    code = _first_code(args.exc_traceback)
    if code is None:
        return False
    named = code.co_name in _NAMES and anatomy.is_of_mlx_lm(code.co_filename)
    return named or any(anatomy.runs(generator, code) for generator in engine.living())


def _first_code(trace: Any) -> Any:
    """The code that a thread was started for: its first frame outside threading and wrappers."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(trace)]
    return next((code for code in codes if not anatomy.is_passed(code.co_filename)), None)


def _look() -> None:
    """Called by the watchdog: look for a generation thread that is gone, whatever ended it.

    Only for stock's own class: the loop of a program's own class may end as the program likes.
    """
    if engine.closing:
        return
    for generator in engine.living():
        if not anatomy.is_stock(generator):
            continue
        thread = anatomy.parts_of(generator).thread
        if thread is not None and anatomy.has_ended(thread) and _is_no_stop(generator):
            _die(None)


def _die(error: BaseException | None, show: Any = None) -> NoReturn:
    what = "its loop returned"
    if error is not None:
        what = f"{type(error).__name__}: {report.one_line(error)}"
    # All ranks were asked to stop, and rank 0 ended first.
    if engine.draining and engine.rank:
        why = f"rank {engine.rank} has no other rank left to work with: {what}"
        fatal.exit_orderly(fatal.STOPPED, why)
    status, reason = fatal.EX_SOFTWARE, f"the generation thread died: {what}"
    if engine.proving is not None:
        status, reason = fatal.EX_CONFIG, engine.proving(what)
    elif engine.booting or (not facts.has("boot") and facts.has("turns") and not engine.up):
        status = fatal.EX_CONFIG
        reason = f"the model {engine.model_name} could not be loaded: {what}"
    if show is None and error is not None:
        show = lambda: _show(error)  # noqa: E731
    fatal.die(status, reason, show, error)


def _show(error: BaseException) -> None:
    """Show the traceback by the current hook, a crash reporter's for example, as if uncaught."""
    # Hooks ignore it.
    if isinstance(error, SystemExit):
        traceback.print_exception(error)
        return
    died = (type(error), error, error.__traceback__, threading.current_thread())
    try:
        threading.excepthook(threading.ExceptHookArgs(died))
    except BaseException as broken:
        report.line(f"threading.excepthook itself failed: {broken!r}")
        traceback.print_exception(error)
    if sys.stderr is not None:
        sys.stderr.flush()
