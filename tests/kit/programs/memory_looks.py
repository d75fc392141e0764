"""Measures what a look at memory costs, in a process whose heap is full of holes.

It prints the figures as JSON:

below, above: average processor time of a look, in seconds, below soft and above it
looks: seconds by the clock for each look, while another thread computes a product with MLX
took: seconds of that product
started: processes started during all of that
heard: whether a process that is started as a control is noticed
"""

import json
import pathlib
import subprocess
import sys
import threading
import time

import mlx.core as mx

sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))
from shim.core import report
from shim.guards.exhausted_memory import _Guard

GIB = 2**30
LOOKS = 300
STARTS = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.system",
    "pty.spawn",
}

started = []
sys.addaudithook(lambda event, _: started.append(event) if event in STARTS else None)


def guard_of(soft):
    """A guard whose model is up, as a function that looks at each call."""
    guard = _Guard(mx, soft, 0)
    guard._begun = True

    def look():
        guard._looked = -1e9
        guard()

    return look


def cost(look):
    look()
    begun = time.thread_time()
    for _ in range(LOOKS):
        look()
    return (time.thread_time() - begun) / LOOKS


def fill():
    """Take about 60 MB with 10,000 holes, which malloc must go through to give memory back."""
    held = [bytes(2000 + n % 3000) for n in range(20_000)]
    del held[::2]
    return held, [{n: str(n)} for n in range(100_000)]


def beside_a_product():
    a = mx.random.normal((600, 600)) / 25
    tries = []
    # The first try is slower.
    for _ in range(4):
        begun = time.monotonic()
        mx.eval(a @ a @ a @ a)
        tries.append((time.monotonic() - begun) / 3)
    # Three seconds of work, and more on a busy machine.
    times = int(3 / min(tries))
    took = []

    def compute():
        begun = time.monotonic()
        b = a
        for _ in range(times):
            b = b @ a
        mx.eval(b)
        took.append(time.monotonic() - begun)

    worker = threading.Thread(target=compute)
    worker.start()
    looks, below, above = [], guard_of(100 * GIB), guard_of(1)
    while worker.is_alive():
        for look in (below, above):
            begun = time.monotonic()
            look()
            looks.append(time.monotonic() - begun)
        time.sleep(0.01)
    return {"looks": looks, "took": took[0]}


if __name__ == "__main__":
    report.line = lambda text: None
    # Held until the end.
    kept = fill()
    figures = {"below": cost(guard_of(100 * GIB)), "above": cost(guard_of(1))} | beside_a_product()
    figures["started"] = list(started)
    subprocess.run([sys.executable, "-c", ""], check=True)
    figures["heard"] = len(started) > len(figures["started"])
    print(json.dumps(figures))
