"""docs/compatibility.md has every release, in the words of the shim and its bench."""

from __future__ import annotations

from typing import get_args

import pytest

from kit import releases
from kit.pages import compatibility
from kit.releases import RELEASES, Pair
from kit.scenarios import COLUMNS, Seen, cell
from shim.cli.releases import TRIED
from shim.core import report
from shim.core.catalogue import GUARDS


def page():
    return compatibility.tables(compatibility.PAGE.read_text())


def test_the_shim_names_the_releases_that_are_run():
    assert tuple(RELEASES) == TRIED
    assert list(RELEASES)[-1] == releases.NEWEST


def test_the_page_has_every_release_in_both_tables():
    for table in page():
        assert {row["mlx-lm"] for row in table} - {""} == set(RELEASES)


def test_every_cell_is_a_verdict_and_has_both_sides_below_it():
    seen, _ = page()
    assert len(seen) % 3 == 0
    for verdict, stock, shim in zip(*[iter(seen)] * 3, strict=True):
        assert [row[""] for row in (verdict, stock, shim)] == ["", "stock", "shim"]
        for column in COLUMNS:
            assert compatibility.CELL.fullmatch(verdict[column]), verdict[column]
            assert stock[column]
            assert shim[column]


def test_every_state_is_one_the_shim_knows():
    _, states = page()
    known = set(get_args(report.Kind))
    for row in states:
        assert {row[f"`{name}`"] for name in compatibility.HEART} <= known
    assert set(compatibility.HEART) <= set(GUARDS)


@pytest.mark.parametrize(
    ("stock", "shim", "is_"),
    [
        (Seen(False, "zombie"), Seen(True, "exit 70"), "yes"),
        (Seen(False, "zombie"), Seen(False, "zombie"), "NO"),
        (Seen(False, "zombie"), "the server did not start", "NO"),
        (Seen(True, "refused"), Seen(True, "refused"), "not affected"),
        (Seen(True, "refused"), Seen(False, "200"), "NO"),
        ("no model", Seen(True, "exit 70"), "not tried (with stock: no model)"),
        (None, None, "not tried (with stock: not seen)"),
    ],
)
def test_what_is_no_fault_of_stock_proves_nothing(stock, shim, is_):
    assert cell(stock, shim) == is_
    assert compatibility.CELL.fullmatch(is_)


def test_each_release_runs_once_and_each_other_python_the_newest_it_takes():
    found = [str(pair) for pair in releases.pairs(["3.10", "3.11", "3.12", "3.14"])]
    assert found == [
        *("0.30.7-3.11", "0.31.0-3.11", "0.31.1-3.11", "0.31.2-3.11", "0.31.3-3.10", "0.31.3-3.11"),
        *("0.32.0-3.11", "0.32.1-3.11", "0.32.2-3.11", "0.32.2-3.12", "0.32.2-3.14"),
    ]
    assert Pair("0.32.2", "3.13") in releases.pairs(["3.13"])


def test_a_python_that_is_not_here_is_said_not_to_have_run():
    rows = [compatibility.Row(Pair("0.32.2", "3.11"), "0.32.4")]
    absent = ["no Python 3.14 here", "mlx-lm 0.32.2 cannot be installed for Python 3.13"]
    text = compatibility.page(rows, absent, "0", "a system", 90)
    assert "\n* not run: no Python 3.14 here\n" in text
    assert "\n* not run: mlx-lm 0.32.2 cannot be installed for Python 3.13\n" in text
    assert "not run" not in compatibility.page(rows, [], "0", "a system", 90)
