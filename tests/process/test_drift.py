"""A name of stock that the shim touches is another: the heart beats on, or the shim has said at start that it does not.

Of each line every name is renamed, and those of the heart are changed in each other way as well; tests/bench/drift.py
does all to all. A case is a server over a changed copy of mlx_lm: it serves as stock does, its model hangs and goes
on, and its generation thread is killed.
"""

from __future__ import annotations

import time

import drift
import pytest
from drift_cases import HEART, Bench, cases, touched
from drift_report import table
from harness import LINES

from shim.anatomy import ATTRIBUTES

PARTS = 4  # of a line: the workers take one each


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """The bench of a line, made when it is asked for: its fork server serves all cases of this worker."""
    made = {}

    def bench(line):
        if line not in made:
            made[line] = Bench(line, tmp_path_factory.mktemp(f"drift-{line}"))
        return made[line]

    yield bench
    for each in made.values():
        each.close()


def wanted(line, folder):
    """The cases of the suite, in an order that gives each part as many of each kind."""
    everything, heart = touched(line, folder), touched(line, folder, HEART)
    assert set(heart) < set(everything)
    return sorted({*cases(everything, ["renamed"]), *cases(heart, drift.KINDS)}, key=lambda case: case[::-1])


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("line", LINES)
def test_the_heart_beats_on(line, part, benches, tmp_path):
    begun = time.monotonic()
    rows = benches(line).run_all(wanted(line, tmp_path)[part::PARTS])
    print(f"{len(rows)} cases in {time.monotonic() - begun:.0f} s\n{table(rows)}")
    wrong = [row for row in rows if row.wrong]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("line", LINES)
def test_the_heart_beats_on_without_an_attribute_that_is_read_by_name(line, benches):
    rows = [row for row in benches(line).run_each(ATTRIBUTES) if row is not None]
    print(table(rows))
    assert len(rows) >= len(ATTRIBUTES) - 1, "one is there from 0.32 on"
    wrong = [row for row in rows if row.wrong]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", ["renamed", "other result"])
def test_control_for_the_heart(line, kind, benches):
    benches(line).control("mlx_lm.server", "ResponseGenerator.stop_and_join", kind)


@pytest.mark.parametrize("line", LINES)
def test_a_changed_server_serves_as_stock_does(line, benches):
    """A sample, without the shim: it is the shim that the other tests are about, not the changes."""
    sample = [
        ("mlx_lm.server", name) for name in ("ResponseGenerator.generate", "BatchGenerator.next", "make_prompt_cache")
    ]
    rows = benches(line).run_all(cases(sample, drift.KINDS), benches(line).serves)
    assert len(rows) > len(drift.KINDS)
    assert not [row for row in rows if row.wrong], "\n".join(map(str, rows))
