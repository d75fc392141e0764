"""Which process is the parent, and when it is gone."""

from __future__ import annotations

import os

import pytest

from shim.core import report
from shim.core.verdicts import Incompatible
from shim.engine import drain, fatal
from shim.guards import deserted_server as guard

ME = 100


@pytest.fixture
def tree(monkeypatch):
    """Set who the parent is, and the sessions. The guard makes `.orders` and `.lines` of it."""

    class Tree:
        parent, sessions, pid = 50, {0: 40, 50: 40}, ME
        orders, lines = [], []

        def born(self):
            monkeypatch.setattr(guard, "_birth", guard.birth())

    def getsid(pid):
        try:
            return tree.sessions[pid]
        except KeyError:
            raise ProcessLookupError from None

    tree = Tree()
    tree.orders, tree.lines = [], []
    monkeypatch.setattr(os, "getpid", lambda: tree.pid)
    monkeypatch.setattr(os, "getppid", lambda: tree.parent)
    monkeypatch.setattr(os, "getsid", getsid)
    monkeypatch.setattr(guard, "_asked", False)
    monkeypatch.setattr(guard, "_DEBUGGERS_ARE_PARENTS", False)
    monkeypatch.setattr(drain, "start", lambda: None)
    monkeypatch.setattr(drain, "ask", tree.orders.append)
    monkeypatch.setattr(report, "once", tree.lines.append)
    return tree


def test_a_parent_that_stays(tree):
    tree.born()
    guard.probe(None)
    guard._check()
    assert (tree.orders, tree.lines) == ([], [])


@pytest.mark.parametrize("heir", [1, 7], ids=["the first process", "a subreaper"])
def test_a_parent_that_goes_is_told_once(tree, heir):
    tree.born()
    tree.parent = heir
    for _ in range(3):
        guard._check()
    (order,) = tree.orders
    assert (order.status, order.hurries) == (fatal.STOPPED, False)
    assert order.why == "its parent, process 50, is gone"


@pytest.mark.parametrize(
    ("parent", "sessions"),
    [
        (1, {0: 40, 1: 1}),
        (0, {0: ME}),  # the first process of a container, or one that another namespace started
        (7, {0: 40, 7: 7}),  # the leader of its session is gone, and a subreaper took it up
    ],
)
def test_no_parent_to_watch(tree, parent, sessions):
    tree.parent, tree.sessions = parent, sessions
    tree.born()
    with pytest.raises(Incompatible, match="no parent to watch"):
        guard.probe(None)


@pytest.mark.parametrize(
    "sessions",
    [{0: 40, 50: 40}, {0: ME, 50: 40}, {0: 40}],
    ids=["its session", "one that it leads", "a parent that has just gone"],
)
def test_a_parent_to_watch(tree, sessions):
    tree.sessions = sessions
    tree.born()
    guard.probe(None)
    tree.parent = 1
    guard._check()
    assert len(tree.orders) == 1


def test_a_debugger_on_macos_is_no_new_parent(tree, monkeypatch):
    monkeypatch.setattr(guard, "_DEBUGGERS_ARE_PARENTS", True)
    tree.born()
    tree.parent = 900
    guard._check()
    assert tree.orders == []
    tree.parent = 1
    guard._check()
    assert len(tree.orders) == 1


def test_a_program_that_forks_after_the_import(tree):
    """The child has another parent, which is watched from then on."""
    tree.born()
    tree.pid, tree.parent, tree.sessions = 101, ME, {0: 40, ME: 40}
    guard._check()
    assert tree.orders == []
    tree.parent = 1
    guard._check()
    assert [order.why for order in tree.orders] == [f"its parent, process {ME}, is gone"]


def test_a_fork_whose_parent_went_before_the_first_look(tree):
    tree.born()
    tree.pid, tree.parent, tree.sessions = 101, 1, {0: 40, 1: 1}
    guard._check()
    assert tree.orders == []
    assert "no parent to watch" in tree.lines[0]
