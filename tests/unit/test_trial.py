"""The heart is tried on copies of stock's own generator, and on other generators."""

from __future__ import annotations

import logging
import queue
import threading
import time
import types

import pytest
from mlx_lm import server as stock

from shim.core.verdicts import Incompatible
from shim.engine import facts, trial
from shim.engine.entries import DECODE
from shim.guards import generation_death, stall


class Other:
    """A generator with other names, and a loop that dies in its own way."""

    def __init__(self, provider, cache):
        self.inbox = queue.Queue()
        self._worker = threading.Thread(target=self._loop)
        self._worker.start()

    def _loop(self):
        while True:
            self.inbox.get(timeout=1)


class Swallowing:
    __init__ = Other.__init__

    def _loop(self):
        try:
            Other._loop(self)
        except Exception:
            return


class Queueless:
    def __init__(self, provider, cache):
        self._worker = threading.Thread(target=print)


def server(generator):
    return types.SimpleNamespace(ResponseGenerator=generator, __name__="mlx_lm.server")


def test_the_loop_of_stock_is_seen_to_die_without_a_line(capfd, caplog):
    before = set(threading.enumerate())
    assert generation_death.probe(stock) == ""
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(
    ("generator", "said"), [(Other, ""), (Swallowing, "only the watchdog saw the death")]
)
def test_a_loop_with_another_name(generator, said):
    told = generation_death.probe(server(generator))
    assert said in told
    assert bool(told) == bool(said)


def test_no_thread_but_its_own_has_to_do_with_the_trial(monkeypatch):
    """The trial does not wait for threads that a program starts meanwhile.

    An exception that ends them goes to the program's hook.
    """
    theirs, ours, over = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", theirs.append)

    def meanwhile():
        failing = threading.Thread(target=lambda: 1 / 0)
        failing.start()
        threading.Thread(target=over.wait, daemon=True).start()
        failing.join()

    class Busy:
        def __init__(self, provider, cache, meanwhile=meanwhile):
            self.inbox = queue.Queue()
            meanwhile()
            self._worker = threading.Thread(target=self._loop)
            self._worker.start()

        _loop = Other._loop

    started = time.monotonic()
    assert trial.try_death(server(Busy), lambda copy: None, ours.append)
    assert time.monotonic() - started < trial.WAIT_LIMIT
    assert [args.exc_type for args in theirs] == [ZeroDivisionError]
    assert [args.exc_type for args in ours] == [trial.Fault]
    over.set()


def test_a_trial_in_a_program_with_a_hook_of_its_own(monkeypatch):
    """The shim takes only the exception that ends the thread of the trial."""
    theirs = []
    monkeypatch.setattr(threading, "excepthook", theirs.append)
    assert trial.try_death(server(Other), lambda copy: None, lambda args: None)
    assert theirs == []
    assert threading.excepthook == theirs.append


def test_stock_is_seen_to_deliver():
    entry, engine = trial.try_decode(stock)
    assert (entry.phase, entry.tokens) == (DECODE, 1)
    assert engine.deliveries == 3
    assert stall.probe(stock) is None


def test_a_delivery_that_is_not_seen_is_no_active_guard(monkeypatch):
    monkeypatch.setattr(stall, "_judge", lambda *_: None)
    with pytest.raises(Incompatible, match="was not seen"):
        stall.probe(stock)


def test_a_generator_without_a_queue_of_requests(monkeypatch):
    with pytest.raises(LookupError, match=r"no queue\.Queue of requests"):
        trial.try_deliveries(server(Queueless))
    trial.try_deliveries(stock)


def test_what_cannot_be_tried_tells_nothing():
    assert trial.generator(types.SimpleNamespace(__name__="mlx_lm.server")) is None
    assert trial.try_decode(types.SimpleNamespace(__name__="mlx_lm.server")) is None
    assert not trial.try_death(
        types.SimpleNamespace(__name__="mlx_lm.server"), lambda copy: None, lambda args: None
    )


def test_the_trials_take_milliseconds():
    started = time.perf_counter()
    generation_death.probe(stock)
    stall.probe(stock)
    trial.try_deliveries(stock)
    assert time.perf_counter() - started < 2, "a generous bound: 5 ms where nothing else runs"


def test_stock_is_left_as_it_was():
    names = dict(vars(stock.ResponseGenerator))
    handlers = list(logging.getLogger().handlers)
    generation_death.probe(stock)
    stall.probe(stock)
    assert dict(vars(stock.ResponseGenerator)) == names
    assert logging.getLogger().handlers == handlers
    assert facts.known["loop"].lost is not None, "a trial watches nothing"
