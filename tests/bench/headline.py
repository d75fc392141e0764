"""Measures deaths in a row under supervisord, while eight openai clients ask all the time.

It runs the shim with the socket handed over, the shim without, and stock, one after another. The
tables are for docs/sockets.md.

.venvs/0.32.2/bin/python tests/bench/headline.py [deaths] [seconds to watch stock]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import FaultyModel
from kit import headline
from kit.harness import NEWEST
from kit.headline import KILLS, RAISES, STALLS


def guarded(folder: Path, model: FaultyModel, deaths: int, *, hand_over: bool) -> None:
    with headline.Supervised(NEWEST, model, folder, hand_over=hand_over) as server:
        server.ready()
        crowd = headline.Crowd(server.port)
        times = headline.endure(
            server, crowd, [(KILLS, RAISES, STALLS)[n % 3] for n in range(deaths)]
        )
        hung = crowd.leave()
        print(f"\nthe shim, {'with' if hand_over else 'without'} the socket handed over")
        print(headline.table(times))
        say(crowd, hung, server.deaths)


def stock(folder: Path, model: FaultyModel, seconds: float) -> None:
    with headline.Supervised(
        NEWEST, model, folder, hand_over=False, environ={"MLX_SHIM": "0"}
    ) as server:
        server.ready()
        crowd = headline.Crowd(server.port)
        crowd.settle()
        server.die(RAISES)
        time.sleep(1)
        died = time.monotonic()
        time.sleep(seconds)
        answered = crowd.answered_since(died)
        print(f"\nstock, watched for {seconds:g} s after one death")
        print(
            f"answered again after {answered - died:.1f} s"
            if answered
            else "no client was answered any more"
        )
        waiting = sum(client.thread.is_alive() and not client.errors for client in crowd.clients)
        say(crowd, waiting, 1)


def say(crowd: headline.Crowd, hung: int, deaths: int) -> None:
    kinds = sorted({type(error).__name__ for error in crowd.errors})
    longest = max(client.longest for client in crowd.clients)
    print(
        f"{deaths} deaths, {crowd.answers} answers, {len(crowd.errors)} errors {kinds or ''},"
        f" {hung} still waiting;"
    )
    print(
        f"the longest request took {longest:.1f} s;"
        f" {crowd.refused} of {crowd.probes} probes refused",
        flush=True,
    )


def main() -> None:
    deaths = int(sys.argv[1]) if sys.argv[1:] else 20
    seconds = float(sys.argv[2]) if sys.argv[2:] else 60
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = FaultyModel(folder / "faulty", kind=RAISES, once=True, delay=0.005)
        guarded(folder / "with", model, deaths, hand_over=True)
        guarded(folder / "without", model, deaths, hand_over=False)
        stock(folder / "stock", model, seconds)


main()
