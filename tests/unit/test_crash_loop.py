"""The journal of deaths and its state file, when the clock, the disk or a file is wrong."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time

import pytest

from shim.core import memory, settings
from shim.core.values import Limit
from shim.guards import crash_loop
from shim.guards.crash_loop import backoff
from shim.guards.crash_loop import journal as journal_module
from shim.guards.crash_loop.backoff import Death
from shim.guards.crash_loop.journal import Journal
from shim.guards.crash_loop.state_file import LOADING, UP, Run, State, StateFile

LIMIT = Limit(3, 600.0, 10.0)
NOW = 1_800_000_000.0
YEAR = 365 * 86400.0


def deaths(*ages, status=70):
    """Deaths so many seconds ago, oldest first."""
    return [Death(NOW - age, status) for age in ages]


@pytest.fixture
def clock():
    return [NOW]


@pytest.fixture
def start(engine, monkeypatch, tmp_path, clock, lines):
    """Make a journal like a start does. Returns it and the seconds it waits.

    The journal before is over, and its lock released.
    """
    monkeypatch.setattr(journal_module, "engine", engine)
    monkeypatch.setattr(crash_loop, "engine", engine)
    monkeypatch.setattr(settings, "current", settings.Settings(breaker=LIMIT))
    monkeypatch.setattr(journal_module, "JITTER", 0.0)
    # The test looks itself.
    monkeypatch.setattr(journal_module, "LOOK_INTERVAL", 3600.0)
    held: list[StateFile] = []

    def make():
        held.append(StateFile(tmp_path / "state", "name"))
        return held[-1]

    def begin():
        while held:
            os.close(held.pop()._lock)
        journal = Journal(make, now=lambda: clock[0])
        return journal, (journal.post(journal.begin, 5) or (None, State()))[0]

    return begin


def do(journal, job, *args):
    journal.post(lambda: job(*args), 5)


def die(start, times, status=70):
    for _ in range(times):
        journal, _ = start()
        do(journal, journal.note_loading)
        do(journal, journal.note_end, status)


def test_deaths_are_waited_for_once_each(start, clock):
    die(start, 3, status=78)
    journal, seconds = start()
    assert seconds == 10
    do(journal, journal.note_loading)
    do(journal, journal.note_up)
    do(journal, journal.note_end, None)
    journal, seconds = start()
    assert seconds == 0, "the start has waited for its deaths, and an orderly stop is not one"
    do(journal, journal.note_loading)
    clock[0] += 5
    journal, seconds = start()
    assert seconds == 20, "it was killed"
    clock[0] += 8
    journal, seconds = start()
    assert seconds == 12, "the rest of the wait that was cut short"
    do(journal, journal.note_end, None)
    clock[0] += 2
    assert start()[1] == 10, "the same after an orderly stop"


def test_a_wait_is_drawn_a_little_longer_but_not_beyond_the_longest(start, clock, monkeypatch):
    monkeypatch.setattr(journal_module, "JITTER", 0.1)
    monkeypatch.setattr(journal_module.random, "uniform", lambda low, high: high)
    die(start, 3)
    assert start()[1] == pytest.approx(11)
    clock[0] += 4
    assert start()[1] == pytest.approx(7), "the rest, without another random part"
    die(start, 9)
    assert start()[1] == pytest.approx(backoff.LONGEST_WAIT)
    assert start()[1] <= backoff.LONGEST_WAIT


def test_what_is_drawn(start, monkeypatch):
    monkeypatch.setattr(journal_module, "JITTER", 0.1)
    die(start, 3)
    drawn = set()
    for _ in range(20):
        journal, seconds = start()
        drawn.add(seconds)
        # Without this, a wait would be the rest of the one before.
        journal.state = journal_module.replace(journal.state, run=None)
        do(journal, journal.save)
    assert len(drawn) > 10
    assert all(10 <= seconds <= 11 for seconds in drawn)


def test_a_long_good_run_clears_it_and_a_shorter_one_does_not(start, monkeypatch):
    die(start, 3)
    journal, _ = start()
    do(journal, journal.note_loading)
    do(journal, journal.note_up)
    for up, left in ((599, 3), (601, 0)):
        journal._up_since = time.monotonic() - up
        do(journal, journal.look)
        assert len(journal.state.deaths) == left


def test_it_is_seen_once_a_minute_with_what_it_holds(start, clock, monkeypatch):
    journal, _ = start()
    do(journal, journal.note_up)
    monkeypatch.setattr(memory, "footprint", lambda: 5)
    clock[0] += 100
    do(journal, journal.look)
    assert journal._file.read().run.seen == NOW
    journal._seen -= journal_module.NOTE_INTERVAL
    do(journal, journal.look)
    assert journal._file.read().run.seen == NOW + 100
    assert journal._file.read().footprint == 5


def test_a_stop_under_way_is_noted_however_it_was_asked_for(start, engine, monkeypatch):
    journal, _ = start()
    do(journal, journal.note_up)
    monkeypatch.setattr(type(engine), "stopping", True)
    do(journal, journal.look)
    # A load went on meanwhile.
    do(journal, journal.note_up)
    assert journal._file.read().run is None


@pytest.mark.parametrize("jump", [-YEAR, 30 * YEAR])
def test_a_clock_that_jumps_costs_no_more_than_the_memory_of_deaths(start, clock, jump):
    die(start, 4)
    clock[0] += jump
    # This run is over without a note, which is one death.
    assert start()[1] == 0
    die(start, 2)
    assert start()[1] == 10
    clock[0] -= jump
    assert start()[1] == 0


def test_a_wait_under_a_clock_that_goes_back_is_no_longer(start, clock):
    die(start, 3)
    assert start()[1] == 10
    clock[0] -= 4
    assert start()[1] == 10


def test_two_processes_at_once(start, tmp_path, clock, lines):
    first, _ = start()
    do(first, first.note_up)
    second = Journal(lambda: StateFile(tmp_path / "state", "name"), now=lambda: clock[0])
    assert second.post(second.begin, 5) is None
    do(second, second.note_loading)
    do(second, second.note_end, 70)
    assert first._file.read().run.phase == UP
    assert first._file.read().deaths == []
    assert len(lines) == 1
    assert "another process serves this model" in lines[0]


def test_modes_and_size(start, tmp_path):
    die(start, 200)
    folder = tmp_path / "state"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {f.name for f in folder.iterdir()} == {"name.json", "name.lock"}
    assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}
    assert (folder / "name.json").stat().st_size < 8192


CORRUPT = {
    "empty": b"",
    "binary": os.urandom(1000),
    "NULs": bytes(500),
    "huge": b"[" + b"1," * 10**6 + b"1]",
    "deep": b"[" * 60_000,
    "cut": State(deaths(1, 2)).encode()[:-9],
    "a list": b"[]",
    "null": b"null",
    "a number of 5000 digits": b'{"deaths": ' + b"9" * 5000 + b"}",
    "no deaths": b"{}",
    "deaths that are none": State().encode().replace(b"[]", b"7"),
    "a death that is a word": State().encode().replace(b"[]", b'["ab"]'),
    "a death at NaN": State().encode().replace(b"[]", b"[[NaN, 70]]"),
    "a death at infinity": State().encode().replace(b"[]", b"[[1e999, 70]]"),
    "a death at true": State().encode().replace(b"[]", b"[[true, 70]]"),
    "a size of 1e300": State(model=7).encode().replace(b"7", b"1e300"),
    "a phase of its own": State(run=Run("up", 1)).encode().replace(b'"up"', b'"down"'),
    "a phase that is no word": State(run=Run("up", 1)).encode().replace(b'"up"', b"[1]"),
    "a run that is true": State().encode().replace(b"null", b"true"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_said_and_replaced(start, tmp_path, lines, case):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "name.json").write_bytes(CORRUPT[case])
    journal, seconds = start()
    assert seconds == 0
    assert len(lines) == 1
    assert "name.json is not a state file of the shim" in lines[0]
    do(journal, journal.note_end, 70)
    assert len(journal._file.read().deaths) == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_file(start, tmp_path, lines, make):
    (tmp_path / "state").mkdir()
    make(tmp_path / "state" / "name.json")
    journal, seconds = start()
    assert seconds == 0
    assert len(lines) == 1
    assert "not a regular file" in lines[0]
    assert journal._file.read().run.phase == LOADING


@pytest.mark.parametrize("name", ["name.lock", "name.new", "name.json"])
def test_what_cannot_be_replaced_is_said_once_and_in_nobodys_way(start, tmp_path, lines, name):
    folder = tmp_path / "state"
    (folder / name).mkdir(parents=True)
    (folder / name / "x").touch()
    # A folder cannot move here.
    (folder / "name.aside").touch()
    journal, seconds = start()
    assert not seconds
    for _ in range(3):
        do(journal, journal.note_loading)
        do(journal, journal.note_end, 70)
    assert sum("deaths cannot be noted" in x for x in lines) == 1


def test_a_link_is_not_followed(start, tmp_path, lines):
    other = tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / "state").mkdir()
    for name in ("name.json", "name.new"):
        (tmp_path / "state" / name).symlink_to(other)
    assert not start()[1]
    assert len(lines) == 1
    assert other.read_text() == "theirs"


def test_a_disk_that_fills_up_and_is_freed_again(start, monkeypatch, lines):
    journal, _ = start()
    stock = os.write

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for broken in (full, lambda opened, text: stock(opened, text[:10])):
        monkeypatch.setattr(os, "write", broken)
        do(journal, journal.note_up)
    monkeypatch.setattr(os, "write", stock)
    assert journal._file.read().run.phase == LOADING, "the last whole note"
    assert all("deaths cannot be noted" in x and "space" in x for x in lines)
    do(journal, journal.note_end, 70)
    assert len(journal._file.read().deaths) == 1


def test_a_folder_that_never_answers(lines):
    never = threading.Event()
    journal = Journal(never.wait)
    before = time.monotonic()
    assert journal.post(journal.begin, 0.3) is None
    journal.post(lambda: journal.note_end(70), 60)
    assert time.monotonic() - before < 30, "the journal waits for it once"
    assert lines == [
        "the folder of MLX_SHIM_STATE_DIR has not answered for 0.3 s: it is not waited for"
    ]
