"""What the watchdog does as a server starts, before its thread has looked."""

from __future__ import annotations

import threading

import pytest

from shim.core import report
from shim.engine import watchdog


@pytest.fixture
def fresh(monkeypatch):
    """A watchdog that has no check and has not been started; its thread ends at once."""
    for name in ("_checks", "_first_checks"):
        monkeypatch.setattr(watchdog, name, [])
    monkeypatch.setattr(watchdog, "_start_once", threading.Lock())
    monkeypatch.setattr(watchdog, "_run", lambda: None)


def test_what_is_first_is_called_in_the_thread_that_starts_it(fresh):
    seen = []
    watchdog.add(lambda: seen.append("every look"))
    watchdog.add(lambda: seen.append(threading.current_thread()), first=True)
    for _ in range(2):
        watchdog.start()
    assert seen == [threading.current_thread()]


def test_a_first_check_that_fails_stops_no_server(fresh, monkeypatch):
    told = []
    monkeypatch.setattr(report, "mark_failed", lambda *said: told.append(said))

    def check():
        raise OSError("no")

    watchdog.add(check, first=True)
    watchdog.start()
    assert watchdog._checks == []
    ((guard, why),) = told
    assert (guard, "its check failed" in why) == ("test_watchdog", True)


def test_nothing_is_armed_without_the_thread(fresh, monkeypatch):
    """A timer that no thread arms again would end a healthy server."""
    seen = []
    watchdog.add(lambda: seen.append(1), first=True)

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        watchdog.start()
    assert seen == []
