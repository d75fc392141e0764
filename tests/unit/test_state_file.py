"""Where the state file is, who owns it, and that the shim reads what it has written."""

from __future__ import annotations

import os

import pytest

from shim.guards.crash_loop import state_file
from shim.guards.crash_loop.backoff import Death
from shim.guards.crash_loop.journal import Journal
from shim.guards.crash_loop.state_file import WAITING, Corrupt, Held, Run, State, StateFile


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert state_file.folder("") == tmp_path / ".local" / "state" / "mlx-lm-shim"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert str(state_file.folder("")) == "/xdg/mlx-lm-shim"
    assert state_file.folder("~/here") == tmp_path / "here"
    monkeypatch.setattr("sys.platform", "darwin")
    assert state_file.folder("") == tmp_path / "Library" / "Application Support" / "mlx-lm-shim"


@pytest.mark.parametrize("home", ["", "/", "relative"])
def test_no_home(monkeypatch, lines, home):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    account = Journal(lambda: StateFile(state_file.folder(""), "name"))
    assert account.post(account.begin, 5) is None
    assert "deaths cannot be noted" in lines[0]


def test_keys():
    assert state_file.key("h", 1, "m") == state_file.key("h", 1, "m")
    assert (
        len({state_file.key("h", 1, "m"), state_file.key("h", 2, "m"), state_file.key("h", 1, "n")})
        == 3
    )
    assert "secret" not in state_file.key("h", 1, "secret")
    assert state_file.key("h", 1, "\ud800") == state_file.key("h", 1, "\ud800")


def test_a_lock_is_the_living_ones(tmp_path):
    first = StateFile(tmp_path, "x")
    with pytest.raises(Held):
        StateFile(tmp_path, "x")
    os.close(first._lock)
    os.close(StateFile(tmp_path, "x")._lock)


def test_what_is_written_is_read(tmp_path):
    state = State([Death(1.5, 70), Death(2.5, None)], True, True, 7, 8, Run(WAITING, 3.5, 4.5))
    assert state_file.decode(state.encode()) == state
    with pytest.raises(Corrupt):
        state_file.decode(b"\xff")
