"""A name of stock has changed: the heart beats on, or the shim has said at start that it does not.

Every name that the shim touches is renamed, and those of the heart are changed in each other way as
well. Cases that both lines have are divided between them; tests/bench/drift.py runs all on all. A
case is a server over a changed copy of mlx_lm: it serves as stock does, its model hangs and goes
on, and its generation thread is killed.
"""

from __future__ import annotations

import time
import zlib
from functools import cache

import pytest

from kit.drift import mutate
from kit.drift.cases import HEART, SERVER, Bench, cases, touched
from kit.drift.report import table
from kit.harness import LINES
from kit.streams import Stream
from shim.engine.anatomy import ATTRIBUTES

# The parts of a line. The workers take one each.
PARTS = 4


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    """The bench of a line, made when it is asked for."""
    made = {}

    def bench(line):
        if line not in made:
            made[line] = Bench(line, tmp_path_factory.mktemp(f"drift-{line}"))
        return made[line]

    return bench


@cache
def asked_for(line, folder):
    """The heart's names renamed, and the cases that take turns."""
    everything, heart = touched(line, folder), touched(line, folder, HEART)
    assert set(heart) < set(everything)
    renamed = set(cases(heart, ["renamed"]))
    return renamed, {*cases(everything, ["renamed"]), *cases(heart, mutate.KINDS)} - renamed


def wanted(line, folder):
    """The cases of the suite, in an order that gives each part as many of each kind.

    Each name of the heart is renamed on both lines. Every other case that both lines have falls to
    one of them.
    """
    renamed, others = asked_for(line, folder)
    (other,) = set(LINES) - {line}
    shared = set().union(*asked_for(other, folder))
    turns = {case for case in others if case not in shared or is_turn_of(line, case)}
    return sorted(renamed | turns, key=lambda case: case[::-1])


def is_turn_of(line, case):
    """Whether a case falls to this line.

    Its name and kind decide, so that it stays there when cases are added.
    """
    return zlib.crc32(" ".join(case).encode()) % len(LINES) == LINES.index(line)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("line", LINES)
def test_the_heart_beats_on(line, part, benches, tmp_path_factory):
    begun = time.monotonic()
    folder = tmp_path_factory.getbasetemp()
    rows = benches(line).run_all(wanted(line, folder)[part::PARTS])
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
def test_the_heart_beats_on_with_a_stop_flag_that_is_an_event(line, benches):
    bench = benches(line)
    source = bench.sources[SERVER]
    for old, new in (
        ("self._stop = False", "self._stop = __import__('threading').Event()"),
        ("self._stop = True", "self._stop.set()"),
        ("while not self._stop:", "while not self._stop.is_set():"),
    ):
        assert old in source
        source = source.replace(old, new)
    row = bench.run_changed(SERVER, "ResponseGenerator._stop", "renamed", {SERVER: source})
    assert not row.wrong, row


@pytest.mark.parametrize("line", LINES)
def test_who_leaves_is_no_stall_where_removals_cannot_be_seen(line, benches):
    """The engine removes their requests unseen, and goes on with the others."""
    bench = benches(line)
    with bench.changed(SERVER, "BatchGenerator.remove", "renamed") as server:
        long = Stream(server.ready(), {"prompt": "x", "max_tokens": 300})
        assert long.first.wait(30)
        for n in range(2):
            server.send_and_leave({"prompt": f"leaves {n}", "max_tokens": 5000, "stream": True})
        time.sleep(1)
        for connection in server.sockets:
            connection.close()
        assert long.join().done, long.lines[-3:]
        assert "stalled" not in server.text()
        assert server.get("/health")[1]["guards"]["stall"] == "degraded"


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", ["renamed", "other result"])
def test_control_for_the_heart(line, kind, benches):
    benches(line).control("mlx_lm.server", "ResponseGenerator.stop_and_join", kind)


@pytest.mark.parametrize("line", LINES)
def test_a_changed_server_serves_as_stock_does(line, benches):
    """A sample, without the shim: so the other tests test the shim, and not the changes."""
    sample = [
        ("mlx_lm.server", name)
        for name in ("ResponseGenerator.generate", "BatchGenerator.next", "make_prompt_cache")
    ]
    rows = benches(line).run_all(cases(sample, mutate.KINDS), benches(line).serves)
    assert len(rows) > len(mutate.KINDS)
    assert not [row for row in rows if row.wrong], "\n".join(map(str, rows))
