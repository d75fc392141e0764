"""Deaths in a row under supervisord: with the socket handed over no request is refused, lost or left waiting."""

from __future__ import annotations

import headline
import pytest
from harness import Inconclusive
from headline import KILLS, RAISES, STALLS


@pytest.fixture
def model(faulty):
    return faulty(kind=RAISES, once=True, delay=0.005)


def test_every_request_is_answered_in_the_end(line, model, tmp_path):
    with headline.Supervised(line, model, tmp_path / "supervised", hand_over=True) as server:
        server.ready()
        crowd = headline.Crowd(server.port)
        times = headline.endure(server, crowd, [KILLS, RAISES, STALLS])
        assert crowd.leave() == 0, "none hangs"
        print(f"\n{line}: {crowd.answers} answers, {crowd.probes} probes\n{headline.table(times)}")
        assert crowd.errors == [], "none is lost"
        assert crowd.refused == 0
        assert server.text().count("exit 70") == server.deaths >= 3


def test_control_without_the_socket_some_are_refused(model, tmp_path):
    with headline.Supervised(headline.NEWEST, model, tmp_path / "supervised", hand_over=False) as server:
        server.ready()
        crowd = headline.Crowd(server.port, clients=1)
        headline.endure(server, crowd, [RAISES])
        crowd.leave()
        if not crowd.refused:
            raise Inconclusive(f"none of {crowd.probes} probes was refused")
