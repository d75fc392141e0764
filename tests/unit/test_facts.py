"""The state of a guard is computed from the facts by which it lives."""

from __future__ import annotations

import importlib

import pytest

from shim import boot
from shim.core import report, settings
from shim.core.catalogue import GUARDS, HEART
from shim.engine import facts


@pytest.fixture
def seen(monkeypatch):
    """Every fact is seen. `seen(name)` loses one."""
    for fact in facts.known.values():
        monkeypatch.setattr(fact, "lost", None)
        monkeypatch.setattr(fact, "seen", False)
        monkeypatch.setattr(fact, "was_unseen", False)
    monkeypatch.setattr(facts, "on_loss", [])

    def lose(*names):
        for name in names:
            facts.lose(name, "it is gone")

    return lose


def lives_by(name):
    return getattr(importlib.import_module(f"shim.guards.{name}"), "LIVES_BY", {})


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_lives_by_facts_that_there_are(name):
    for key, cost in lives_by(name).items():
        names = (key,) if isinstance(key, str) else key
        assert all(fact in facts.known for fact in names)
        assert cost == facts.NEEDED or len(cost) > 10


@pytest.mark.parametrize("name", HEART)
def test_no_single_fact_takes_a_guard_of_the_heart(seen, name):
    """A missing name costs one fact. Only endless_wait needs one, to wake waiting clients."""
    for fact in facts.known.values():
        fact.lost = "it is gone"
        kind, reason = facts.judge(lives_by(name))
        expected = "incompatible" if (name, fact.name) == ("endless_wait", "deliveries") else None
        assert kind in ((expected,) if expected else ("active", "degraded"))
        assert (kind == "active") == (reason == "")
        fact.lost = None


def test_what_is_lost_and_what_it_costs(seen):
    costs = {
        "steps": "a starved request is told late",
        ("boot", "turns"): "78 is 70",
        "deliveries": facts.NEEDED,
    }
    assert facts.judge(costs) == ("active", "")
    seen("boot")
    assert facts.judge(costs) == ("active", ""), "one of the two is enough"
    seen("turns", "steps")
    kind, reason = facts.judge(costs)
    assert kind == "degraded"
    assert reason.split("; ") == [
        "cannot see steps (it is gone): a starved request is told late",
        "cannot see boot (it is gone) nor turns (it is gone): 78 is 70",
    ]
    seen("deliveries")
    assert facts.judge(costs) == ("incompatible", "cannot see deliveries (it is gone)")


def test_watching_that_fails_costs_that_fact_alone(seen):
    def fails():
        raise LookupError("no such name")

    facts.watch("steps", fails)
    facts.watch("turns", lambda: None)
    assert facts.shown() == {"steps": "no such name"}


def test_a_fact_that_no_request_passes_is_lost(seen):
    facts.saw("handlers")
    facts.lose_unseen("never", also={"deliveries": True, "steps": False})
    assert set(facts.shown()) == {"deliveries", "answers", "tokenizing"}


def test_a_fact_that_is_seen_after_all_is_regained(seen):
    judged = []
    facts.on_loss.append(lambda: judged.append(facts.shown()))
    facts.lose_unseen("never", also={"deliveries": True})
    assert len(judged) == 1, "losses at the same time are said once"
    facts.saw("handlers")
    facts.lose_unseen("never", also={"deliveries": False})
    assert set(facts.shown()) == {"answers", "tokenizing"}
    facts.lose("batch", "it is gone")
    facts.saw("batch")
    assert "batch" in facts.shown(), "a fact that cannot be watched stays lost"


def test_a_loss_at_run_time_changes_the_states_and_is_said(seen, monkeypatch, capfd):
    monkeypatch.setattr(
        report, "states", {"stall": report.State("active"), "crash_loop": report.State("active")}
    )
    monkeypatch.setattr(boot, "_at_work", dict(report.states))
    monkeypatch.setattr(boot, "_announced", True)
    facts.on_loss.append(boot._judge)
    seen("steps")
    assert report.states["crash_loop"].kind == "active"
    assert report.states["stall"].kind == "degraded"
    assert "stall is degraded (cannot see steps (it is gone): " in capfd.readouterr().err
    report.mark_failed("stall", "its check failed")
    seen("turns")
    assert report.states["stall"].kind == "failed", "a failed guard stays failed"


def test_the_first_line_says_what_of_the_heart_is_lost(monkeypatch, lines):
    states = {name: report.State("active") for name in GUARDS}
    states |= {
        "stall": report.State("incompatible", "why"),
        "bad_request": report.State("incompatible", "why"),
    }
    states["endless_wait"] = report.State("degraded", "cannot see loads")
    states["crash_loop"] = report.State("off", "MLX_SHIM_CRASH_LOOP is off")
    monkeypatch.setattr(report, "states", states)
    boot._announce()
    first, *others = lines
    assert first.endswith(
        f"guards: {len(GUARDS) - 4} active, 1 degraded, 1 off, 2 incompatible; LOST: stall"
    )
    assert sorted(others) == [
        "bad_request incompatible (why)",
        "endless_wait degraded (cannot see loads)",
        "stall incompatible (why)",
    ]


def test_no_guard_is_left_out_however_many_are_incompatible(monkeypatch, capfd):
    """One long line cut off the last guards when they were needed most."""
    reason = "mlx_lm.server has no " + "ResponseGenerator.a_name_that_is_long" * 3
    monkeypatch.setattr(
        report, "states", {name: report.State("incompatible", reason) for name in GUARDS}
    )
    boot._announce()
    said = capfd.readouterr().err
    assert all(f"mlx-lm-shim: {name} incompatible ({reason})\n" in said for name in GUARDS)
    assert all(name in said.splitlines()[0] for name in HEART)


def test_each_setting_in_force_has_a_line(monkeypatch, lines):
    monkeypatch.setenv("MLX_SHIM_DRAIN", "5s")
    monkeypatch.setenv("MLX_SHIM_EXIT_GRACE", "1s")
    monkeypatch.setenv("MLX_SHIM_API_KEY_FILE", "/the/secret/itself")
    current, _, _ = settings.load()
    monkeypatch.setattr(settings, "current", current)
    monkeypatch.setattr(report, "states", {})
    boot._announce()
    assert lines[1:] == ["MLX_SHIM_DRAIN=5s", "MLX_SHIM_API_KEY_FILE=set"]
