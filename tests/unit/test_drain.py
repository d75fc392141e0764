"""Which signals end a drain, the limits of recycling, and the talk with the kernel and systemd."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
import types

import pytest

from shim.core import memory, sd_notify, settings
from shim.engine import drain, fatal
from shim.guards import abrupt_stop, grown_process


class Ended(Exception):
    pass


@pytest.fixture
def ended(engine, monkeypatch):
    """Carry out an order. Returns (status, why). The test sets `engine.in_flight`."""

    def stop(status, reason, facts=None):
        raise Ended(status, reason, facts)

    monkeypatch.setattr(drain, "engine", engine)
    monkeypatch.setattr(drain, "_orders", queue.SimpleQueue())
    monkeypatch.setattr(fatal, "exit_orderly", stop)
    engine.up = True

    def carry_out(*orders):
        for order in orders[1:]:
            drain.ask(order)
        with pytest.raises(Ended) as ended:
            drain._carry_out(orders[0])
        return ended.value.args

    return carry_out


def test_a_stop_during_a_recycle_is_a_stop(ended, engine, monkeypatch):
    monkeypatch.setattr(settings, "current", settings.Settings(drain=0.2, exit_grace=0.01))
    engine.serving[1] = 0.0
    status, why, facts = ended(drain.Order("recycled", 75, {"x": 1}), drain.Order("SIGTERM"))
    assert (status, facts) == (0, None)
    assert why == "SIGTERM; in flight: 0 finished, 1 cut short"
    assert engine.draining
    assert engine.final_error.code == "shutting_down"


def test_a_second_stop_does_not_wait(ended, engine, monkeypatch):
    monkeypatch.setattr(settings, "current", settings.Settings(drain=3600, exit_grace=3600))
    monkeypatch.setattr(drain, "ECHO_WINDOW", 0.0)
    engine.serving[1] = 0.0
    assert ended(drain.Order("SIGINT"), drain.Order("SIGTERM"))[:2] == (
        0,
        "SIGINT; in flight: 0 finished, 1 cut short",
    )


def test_an_echo_of_the_first_is_none(ended, engine, monkeypatch):
    """`timeout` signals its child and then the group.

    So does a wrapper that passes on a signal that its group got too.
    """
    monkeypatch.setattr(settings, "current", settings.Settings(drain=0.6, exit_grace=0.01))
    engine.serving[1] = 0.0
    began = time.monotonic()
    assert ended(drain.Order("SIGTERM"), drain.Order("SIGTERM"))[0] == 0
    assert time.monotonic() - began >= 0.6


def test_nor_is_an_echo_in_a_drain_that_was_for_something_else(ended, engine, monkeypatch):
    """The process is to be replaced. A stop comes later, and twice, as it does from `timeout`."""
    monkeypatch.setattr(settings, "current", settings.Settings(drain=1.0, exit_grace=0.01))
    monkeypatch.setattr(drain, "ECHO_WINDOW", 0.2)
    engine.serving[1] = 0.0

    def stop_twice():
        for _ in range(2):
            drain.ask(drain.Order("SIGTERM"))

    threading.Timer(0.4, stop_twice).start()
    began = time.monotonic()
    assert ended(drain.Order("recycled", fatal.EX_TEMPFAIL))[0] == 0
    assert time.monotonic() - began >= 1.0


def test_what_cannot_come_is_not_waited_for(ended, engine, monkeypatch):
    monkeypatch.setattr(settings, "current", settings.Settings(drain=3600, exit_grace=0.01))
    engine.serving[1] = 0.0
    engine.stalled = "stalled"
    assert ended(drain.Order("SIGTERM"))[0] == 0
    engine.stalled, engine.up = None, False
    assert ended(drain.Order("SIGTERM"))[0] == 0
    engine.up = True
    engine.generator = types.SimpleNamespace(_generation_failed=True)
    assert ended(drain.Order("SIGTERM"))[0] == 0


def test_a_rank_whose_peers_have_gone(engine, monkeypatch):
    monkeypatch.setattr(drain, "engine", engine)
    monkeypatch.setattr(settings, "current", settings.Settings(drain=3600))
    monkeypatch.setattr(
        drain, "time", clock := types.SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    )
    engine.generator = types.SimpleNamespace(_rank=1, _is_distributed=True)
    patience = drain._Patience()
    for _ in range(4):
        engine.turns += 1
        assert patience.lasts()
        clock.now += drain.SILENCE_LIMIT - 1
    assert patience.lasts()
    clock.now += 1.5
    assert not patience.lasts()


def test_only_defaults_are_replaced_and_put_back(monkeypatch):
    monkeypatch.setattr(drain, "start", lambda: None)
    own = lambda *_: None  # noqa: E731
    monkeypatch.setattr(abrupt_stop.drain, "start", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, own)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        during = abrupt_stop._handling(
            lambda: [signal.getsignal(n) for n in abrupt_stop._DEFAULTS], None, (), {}
        )
        assert during[0] is own
        assert isinstance(during[1], abrupt_stop._Asked)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_signal_is_handled_outside_the_main_thread(monkeypatch):
    seen = []
    run = lambda: seen.append(signal.getsignal(signal.SIGINT))  # noqa: E731
    thread = threading.Thread(target=abrupt_stop._handling, args=(run, None, (), {}))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_child_of_a_fork_dies_of_the_signal():
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, abrupt_stop._Asked(os.getppid()))
        signal.raise_signal(signal.SIGTERM)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_jitter_and_what_is_set(engine, monkeypatch):
    assert grown_process.drawn(settings.Settings(), 1.1) == []
    current = settings.Settings(recycle_requests=1000, recycle_age=3600.0)
    limits = grown_process.drawn(current, 1.05)
    assert [(limit.setting, limit.value) for limit in limits] == [
        ("MLX_SHIM_RECYCLE_REQUESTS", 1050),
        ("MLX_SHIM_RECYCLE_AGE", 3780),
    ]
    monkeypatch.setattr(grown_process, "engine", engine)
    engine.started -= 7200
    assert limits[1].read() == 0, "a wait or a load does not count as age"
    engine.up_since = time.monotonic() - 3600
    assert 3600 <= limits[1].read() < 3660
    drawn = set()
    for _ in range(100):
        added = []
        server = types.SimpleNamespace(mx=None)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(settings, "current", current)
            patched.setattr(drain, "install", lambda _: None)
            patched.setattr(grown_process.patch, "wrap", lambda *_: None)
            patched.setattr(grown_process.watchdog, "add", added.append)
            grown_process.apply(server)
        drawn.add(added[0]._limits[0].value)
    assert len(drawn) > 50
    assert all(1000 <= value <= 1100 for value in drawn)


@pytest.fixture
def recycling(engine, lines, monkeypatch):
    """The guard with limits of 100 requests and 1 GiB, and the model up.

    `.footprint` is what it sees, `.orders` are its orders to the drain.
    """
    it = types.SimpleNamespace(footprint=500 << 20, orders=[], lines=lines)

    def footprint():
        if it.footprint is None:
            raise OSError(24, "Too many open files")
        return it.footprint

    monkeypatch.setattr(grown_process, "engine", engine)
    monkeypatch.setattr(grown_process, "footprint", footprint)
    monkeypatch.setattr(grown_process, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(memory, "at_rest", lambda mx: memory.Usage(0, 0, footprint()))
    monkeypatch.setattr(drain, "ask", it.orders.append)
    limits = grown_process.drawn(
        settings.Settings(recycle_requests=100, recycle_memory=1 << 30), 1.0
    )
    it.guard = grown_process._Recycling(None, limits)
    it.begin = lambda: it.guard.next_request(lambda: "asked", None, (), {})
    return it


def test_nothing_is_judged_before_the_model_is_up(recycling, engine):
    recycling.footprint = 2 << 30
    recycling.guard()
    assert recycling.orders == []
    assert recycling.begin() == "asked"
    recycling.guard()
    assert recycling.orders == [], (
        "the limit is ignored: the process would be recycled before it could serve"
    )
    assert (
        "MLX_SHIM_RECYCLE_MEMORY is ignored: with its model loaded the process already has a"
        " footprint of 2.00 GiB" in recycling.lines[0]
    )
    engine.counters["requests"] = 100
    recycling.guard()
    assert "recycled at 100 requests" in recycling.orders[0].why


def test_a_footprint_that_cannot_be_read_is_not_the_last(recycling, engine):
    """A process without a free file descriptor cannot read it, and must be replaced."""
    recycling.begin()
    recycling.footprint = None
    for _ in range(2):
        recycling.guard()
    assert len(recycling.lines) == 1
    engine.counters["requests"] = 100
    recycling.guard()
    (order,) = recycling.orders
    assert order.why.endswith("its footprint was 500.0 MiB with the model up and is not known")
    recycling.orders.clear()
    engine.counters["requests"], recycling.footprint = 0, 1 << 30
    recycling.guard()
    assert "recycled at a footprint of 1.00 GiB" in recycling.orders[0].why


def test_a_generation_loop_goes_on_without_a_footprint(recycling):
    recycling.footprint = None
    assert recycling.begin() == "asked"
    recycling.footprint = 1 << 30
    recycling.guard()
    assert len(recycling.orders) == 1


def test_one_datagram_for_systemd(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        sd_notify.send(READY=1, STATUS="two\nlines")
        assert listening.recv(4096) == b"READY=1\nSTATUS=two lines"
    for name in ("vsock:2:1", "relative", ""):
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert sd_notify.address() is None
        with pytest.raises(OSError, match="names no UNIX socket"):
            sd_notify.send(READY=1)


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("3000000", None, 1.5),
        ("3000000", "ours", 1.5),
        ("3000000", 1, None),
        (None, None, None),
        ("", None, None),
    ],
)
def test_half_of_what_the_watchdog_allows(monkeypatch, usec, pid, seconds):
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(os.getpid() if value == "ours" else value))
    assert sd_notify.watchdog_interval() == seconds


@pytest.mark.parametrize("usec", ["0", "-1", "fast", "1.5"])
def test_an_interval_that_is_none(monkeypatch, usec):
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    with pytest.raises(ValueError, match="accepted: microseconds"):
        sd_notify.watchdog_interval()
