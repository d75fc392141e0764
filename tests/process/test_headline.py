"""Deaths in a row under supervisord, which holds the socket: no request is refused or lost."""

from __future__ import annotations

import contextlib
import time

import pytest

from conftest import FaultyModel
from kit import headline
from kit.harness import NEWEST, Inconclusive, wait_until
from kit.headline import KILLS, RAISES, STALLS

# Each kind twice, and one more. tests/bench/headline.py plays any number, also without the socket.
DEATHS = {NEWEST: 7}


def model_in(folder):
    return FaultyModel(folder, kind=RAISES, once=True, delay=0.005)


@pytest.mark.slow
@pytest.mark.guard("generation_death", "stall", "refused_while_down")
def test_every_request_is_answered_in_the_end(line, tmp_path):
    kinds = [(KILLS, RAISES, STALLS)[n % 3] for n in range(DEATHS.get(line, 3))]
    with headline.Supervised(
        line, model_in(tmp_path / "faulty"), tmp_path / "supervised", hand_over=True
    ) as server:
        server.ready()
        crowd = headline.Crowd(server.port)
        times = headline.endure(server, crowd, kinds)
        assert crowd.leave() == 0, "none hangs"
        print(f"\n{line}: {crowd.answers} answers, {crowd.probes} probes\n{headline.table(times)}")
        assert crowd.errors == [], "none is lost"
        assert crowd.refused == 0
        assert server.text().count("exit 70") == server.deaths >= len(kinds)


@pytest.mark.slow
@pytest.mark.control("generation_death", "refused_while_down")
def test_controls_without_the_socket_and_stock_side_by_side(tmp_path):
    """Without it some are refused meanwhile, and answered when they try again.

    Stock does not answer any more.
    """
    ways = {"without": {}, "stock": {"MLX_SHIM": "0"}}
    with contextlib.ExitStack() as stack:
        without, stock = (
            stack.enter_context(
                headline.Supervised(
                    NEWEST,
                    model_in(tmp_path / f"model-{way}"),
                    tmp_path / way,
                    hand_over=False,
                    environ=environ,
                )
            )
            for way, environ in ways.items()
        )
        crowd, forsaken = (
            headline.Crowd(server.ready().port, clients=2) for server in (without, stock)
        )
        stack.callback(forsaken.stop)
        forsaken.settle()
        stock.die(RAISES)
        assert wait_until(lambda: not stock.model.trigger.exists(), 60)
        # Answers that it had sent before may arrive just now.
        died = time.monotonic() + 1
        headline.endure(without, crowd, [RAISES])
        assert crowd.leave() == 0
        assert crowd.errors == []
        watched = time.monotonic() - died
        print(
            f"\n{crowd.refused} of {crowd.probes} probes refused; stock watched for {watched:.0f} s"
        )
        if not crowd.refused:
            raise Inconclusive(f"none of {crowd.probes} probes was refused")
        if watched < 2 or forsaken.answered_since(died) or "Traceback" not in stock.text():
            raise Inconclusive("stock went on")
