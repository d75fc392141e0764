"""When a start waits, and for how long: the arithmetic, without a clock or a file."""

from __future__ import annotations

import pytest

from shim.core import settings, values
from shim.core.values import Limit
from shim.guards.crash_loop import backoff
from shim.guards.crash_loop import journal as account_module
from shim.guards.crash_loop.backoff import Death
from shim.guards.crash_loop.state_file import LOADING, UP, WAITING, Run, State

LIMIT = Limit(3, 600.0, 10.0)
NOW = 1_800_000_000.0
YEAR = 365 * 86400.0


def deaths(*ages, status=70):
    """Deaths so many seconds ago, oldest first."""
    return [Death(NOW - age, status) for age in ages]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("5/10m", (5, 600, 10)),
        (" 1/90 ", (1, 90, 10)),
        ("3/1h,2s", (3, 3600, 2)),
        ("3/10m, 500ms", (3, 600, 0.5)),
        ("0", None),
        ("OFF", None),
        ("no", None),
    ],
)
def test_the_setting(text, limit):
    assert values.parse_breaker(text) == limit


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "/",
        "5/",
        "/10m",
        "0/10m",
        "101/10m",
        "-1/10m",
        "5/0",
        "5/10m,",
        "5/10m,0",
        "5/10m,1s,2s",
        "x/y",
        "on",
    ],
)
def test_a_bad_setting_says_what_is_accepted(text):
    loaded, (bad,), _ = settings.load({"MLX_SHIM_BREAKER": text})
    assert "accepted: deaths (1 to 100) and a duration such as 5/10m" in bad
    assert loaded.breaker == (5, 600, 10)


def test_it_waits_after_the_limit_and_doubles_to_ten_minutes():
    waits = [backoff.seconds(deaths(*range(5 * n, 0, -5)), LIMIT) for n in range(12)]
    assert waits == [0, 0, 0, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert backoff.seconds(deaths(*range(128, 0, -1)), Limit(1, 600, 10)) == 600
    assert backoff.seconds(deaths(*range(128, 0, -1)), Limit(1, 600, 10_000)) == 600


def test_deaths_far_apart_do_not_trip_it_and_further_ones_do_not_have_to_be_close():
    assert backoff.seconds(deaths(1500, 1000, 500, 0), LIMIT) == 0
    assert backoff.seconds(deaths(1502, 1501, 1500, 1000, 500), LIMIT) == 40


@pytest.mark.parametrize(
    ("known", "left"),
    [
        # All count as long as the last one is recent.
        (deaths(3000, 2000, 500), 3),
        (deaths(3000, 2000, 601), 0),
        # A clock may be corrected by seconds.
        (deaths(30, 20, -3), 3),
        # A death that is years in the future does not count.
        (deaths(30, 20, -YEAR), 2),
        (deaths(YEAR, YEAR - 1, YEAR - 2), 0),
        (deaths(10, 30, 20), 3),
        (deaths(*range(500, 0, -1)), backoff.MOST_DEATHS),
        ([], 0),
    ],
)
def test_what_is_remembered(known, left):
    kept = backoff.recent(known, LIMIT.window, NOW)
    assert len(kept) == left
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("run", "count"),
    [(None, 1), (Run(WAITING, NOW, NOW + 9), 1), (Run(LOADING, NOW), 2), (Run(UP, NOW), 2)],
)
def test_a_run_that_never_noted_its_end_has_died_unless_it_only_waited(run, count):
    judged = account_module.without_old_deaths(State(deaths(5), run=run), LIMIT, NOW)
    assert len(judged.deaths) == count
    assert judged.killed == (count == 2)
    assert not judged.killed or judged.deaths[-1] == (NOW, None)
