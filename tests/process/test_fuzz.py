"""Two fuzzers with a fixed seed: the schema of a request, and the bytes of a connection.

Each makes 250 tries a line. tests/bench/fuzz.py makes more, with other seeds each time.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from kit.fuzz import Beside, bodies, judge, judge_wire, normal_texts, wires
from kit.harness import Inconclusive, Server

EXAMPLES = settings(
    max_examples=250,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def wanted(tiny, tmp_path_factory):
    """What stock says to the normal streams."""
    texts = {}

    def get(line):
        if line not in texts:
            log = tmp_path_factory.mktemp("stock") / "log"
            with Server(line, tiny, log, environ={"MLX_SHIM": "0"}) as stock:
                texts[line] = normal_texts(stock.ready())
        return texts[line]

    return get


def test_any_request_is_answered_and_hurts_nobody(line, tiny, wanted, tmp_path):
    statuses = Counter()
    with Server(line, tiny, tmp_path / "log") as server:

        @EXAMPLES
        @given(bodies())
        def ask(item):
            statuses[judge(server, *item)] += 1

        with Beside(server.ready(), wanted(line)) as beside:
            ask()
        assert server.get("/health")[1]["status"] == "ok"
        assert "Traceback" not in server.text()
    if min(statuses[200], statuses[400]) < 40 or beside.rounds < 5:
        raise Inconclusive(f"not a fair mix: {statuses}, {beside.rounds} rounds beside")


def test_any_bytes_are_answered_or_hung_up_on(line, tiny, wanted, tmp_path):
    answered = Counter()
    with Server(line, tiny, tmp_path / "log", environ={"MLX_SHIM_READ_TIMEOUT": "300ms"}) as server:

        @EXAMPLES
        @given(wires())
        def send(item):
            answered[judge_wire(server, *item, patience=30).split(b"\r\n")[0][:12]] += 1

        with Beside(server.ready(), wanted(line)):
            send()
        assert server.get("/health")[1]["status"] == "ok"
        assert "Traceback" not in server.text()
    if len(answered) < 4:
        raise Inconclusive(f"not a fair mix: {answered}")
