"""The generation thread dies and the process stays, a zombie: the port answers, nothing is ever generated.

mlx-lm 0.31.3 runs `_generate` as the thread's target, so threading.excepthook sees the death; from 0.32 a wrapper
swallows the exception and sets a flag. Either way the process never exits, and no supervisor restarts it. Here the
process ends: with 78 where the model of --model is known never to have come up, so that a supervisor can tell a typing
error from a crash, else with 70.

A death is seen in four ways, each of which needs less of stock than the one before: by a wrapper around the loop, in
the dying thread; by threading.excepthook, for the thread that a generator started; likewise for any thread
that was started for the loop's function; and by the watchdog, for a generation thread that is gone.
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
    "asked to stop": "a generation thread that ends is a death while the server accepts connections",
    ("boot", "turns"): "a model that cannot be loaded at start ends it with 70, not 78",
}

# The functions within which the loop runs, innermost first.
LOOPS = ("ResponseGenerator._generate", "ResponseGenerator._run_generate")
_NAMES = tuple(path.rpartition(".")[2] for path in LOOPS)


def probe(server: Any) -> str:
    """Have a copy of stock's loop die, and see which way tells of it. Returns what is lost, if anything is."""
    told: list[str] = []

    def looping(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except BaseException:
            told.append("loop")
            return None

    died = trial.deaths(
        server, lambda copy: _wrap_loops(copy, looping), lambda _: told.append("hook")
    )
    if told or not died:
        return ""
    return (
        "in a trial only the watchdog saw the death: it is told within a second, without its reason"
    )


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
    """Around the thread's whole life. Ends the process here, in that thread, whoever catches what outside."""
    engine.attach(instance)
    try:
        result = wrapped(*args, **kwargs)
    except BaseException as error:
        if anatomy.is_asked_to_stop(instance):
            raise  # an orderly stop is under way: what goes wrong in it is the stock server's to show
        _die(error)
    if _is_no_stop(instance):
        _die(None)
    return result


def _is_no_stop(generator: Any) -> bool:
    """Whether a loop that ends was not asked to. Where that cannot be seen: whether connections are still accepted."""
    if anatomy.is_asked_to_stop(generator):
        return False
    if not anatomy.is_stock(generator) and anatomy.read(generator, "_generation_failed") is False:
        return False  # a loop of a program's own, which has ended as the program likes: stock caught nothing
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
    """By identity, then by stock's own frames. Never by the thread's name: other programs use those names too."""
    thread = args.thread  # None where a program calls the hook itself
    generation = [engine.generating, *map(anatomy.thread_of, engine.living())]
    if thread is not None and any(thread is known for known in generation):
        return True
    code = _first_code(args.exc_traceback)
    if code is None:
        return False
    named = code.co_name in _NAMES and anatomy.is_of_mlx_lm(code.co_filename)
    return named or any(anatomy.runs(generator, code) for generator in engine.living())


def _first_code(trace: Any) -> Any:
    """The code that a thread was started for: the first of its frames that is not threading's or a wrapper's."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(trace)]
    return next((code for code in codes if not anatomy.is_passed(code.co_filename)), None)


def _look() -> None:
    """Called by the watchdog: a generation thread that is gone, whatever ended it.

    Of stock's own class only: a loop of a program's own may end, and be asked to, as the program likes.
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
    what = (
        "its loop returned"
        if error is None
        else f"{type(error).__name__}: {report.one_line(error)}"
    )
    if engine.draining and engine.rank:  # all were asked to stop, and rank 0 has gone first
        fatal.exit_orderly(
            fatal.STOPPED, f"rank {engine.rank} has nobody left to work with: {what}"
        )
    never_up = engine.booting or (not facts.has("boot") and facts.has("turns") and not engine.up)
    if engine.proving is not None:
        status, reason = fatal.EX_CONFIG, engine.proving(what)
    elif never_up:
        status, reason = (
            fatal.EX_CONFIG,
            f"the model {engine.model_name} could not be loaded: {what}",
        )
    else:
        status, reason = fatal.EX_SOFTWARE, f"the generation thread died: {what}"
    if show is None and error is not None:
        show = lambda: _show(error)  # noqa: E731
    fatal.die(status, reason, show, error)


def _show(error: BaseException) -> None:
    """The traceback, through whichever hook is in place by now (a crash reporter's, say), as if nobody had caught it."""
    if isinstance(error, SystemExit):  # which the hooks pass over in silence
        traceback.print_exception(error)
        return
    try:
        threading.excepthook(
            threading.ExceptHookArgs(
                (type(error), error, error.__traceback__, threading.current_thread())
            )
        )
    except BaseException as broken:
        report.line(f"threading.excepthook itself failed: {broken!r}")
        traceback.print_exception(error)
    if sys.stderr is not None:
        sys.stderr.flush()
