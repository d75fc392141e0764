"""The scenarios of tests/bench/releases.py on the two lines, each with its control.

The bench runs all of them on all releases.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.harness import NEWEST, REPO, Inconclusive, python_of
from kit.pages import compatibility
from kit.scenarios import SCENARIOS, Scenario, cell
from shim.core.catalogue import GUARDS

# A stall, a drain and the leak have tests of their own, with their controls.
PLAYED = ("death", "health", "empty prompt")


@pytest.mark.parametrize("name", PLAYED)
def test_a_scenario_of_the_compatibility_page(line, tmp_path, name):
    scenario = SCENARIOS[name]
    stages = [
        scenario.stage(python_of(line), tmp_path / str(on), guarded=on) for on in (False, True)
    ]
    with ThreadPoolExecutor() as pool:
        stock, shim = pool.map(scenario.play, stages)
    assert set(stock) == set(shim) == set(scenario.columns)
    cells = {column: cell(stock[column], shim[column]) for column in shim}
    if any(isinstance(seen, str) for seen in stock.values()):
        raise Inconclusive(stock)
    assert set(cells.values()) <= {"yes", "not affected"}, (cells, stock, shim)
    if "yes" not in cells.values():
        raise Inconclusive(f"stock showed no fault: {stock}")


def test_a_scenario_that_cannot_be_played_says_why(tmp_path):
    def breaks(stage):
        raise AssertionError("no model\nis loaded")

    scenario = Scenario(("death", "clients told"), breaks, {"kind": "none"})
    seen = scenario.play(scenario.stage(python_of(NEWEST), tmp_path / "x", guarded=True))
    assert seen == {"death": "no model is loaded", "clients told": "no model is loaded"}


def test_the_doctor_is_understood(line):
    states = compatibility.ask_doctor(python_of(line))
    assert set(states) == set(GUARDS)
    assert states["generation_death"] == ("active", "")
    assert states["overwired_memory"][0] == "off"
    assert str(REPO) not in str(states)
