"""What the shim tells systemd each second, without a socket.

How long a start may ask for more time, and in which words.
"""

from __future__ import annotations

import pytest

from shim.core import sd_notify
from shim.engine.state import Hold
from shim.guards import unseen_by_systemd

MORE = {"EXTEND_TIMEOUT_USEC": 60_000_000}


@pytest.fixture
def sent(engine, monkeypatch):
    """The messages that were sent, each as a dictionary."""
    told = []
    monkeypatch.setattr(unseen_by_systemd, "engine", engine)
    monkeypatch.setattr(sd_notify, "send", lambda **assignments: told.append(assignments))
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    return told


def extended(sent, told, seconds):
    """How often the shim asked for more time, with a look each second."""
    before = sent.count(MORE)
    for now in seconds:
        told._tell(float(now))
    return sent.count(MORE) - before


def test_a_start_that_waits_asks_for_more_time_however_long(engine, sent):
    told = unseen_by_systemd._Told()
    engine.start_wait, engine.loading = Hold("5 deaths", 1e9), 1
    assert extended(sent, told, range(1)) == 1, "at once"
    assert extended(sent, told, range(1, 5)) == 0
    assert extended(sent, told, range(5, 7200)) >= 7200 / 5 - 1
    assert {"STATUS": "5 deaths"} in sent


def test_one_that_loads_asks_for_half_an_hour_and_one_that_is_up_or_over_no_more(engine, sent):
    told = unseen_by_systemd._Told()
    engine.loading = 1
    assert extended(sent, told, range(1800)) == 360
    assert extended(sent, told, range(1800, 3600)) == 0
    engine.loading, engine.up = 0, True
    assert extended(sent, told, range(3600, 3700)) == 0

    for over in ({"draining": True}, {"stalled": "stalled"}):
        told = unseen_by_systemd._Told()
        vars(engine).update(over, up=False)
        assert extended(sent, told, range(60)) == 0


def test_the_words(engine, sent):
    engine.generator = None
    assert unseen_by_systemd.status() == "starting (--model none)"
    engine.up = True
    assert unseen_by_systemd.status() == "serving (--model none)"
    engine.loading = 1
    assert unseen_by_systemd.status() == "loading a model (--model none)"
    engine.start_wait = Hold("2 deaths", 1e9)
    assert unseen_by_systemd.status() == "2 deaths"
    engine.stalled = "stalled: request 1"
    assert unseen_by_systemd.status() == "stalled: request 1"
    engine.draining = True
    assert unseen_by_systemd.status() == "draining"
