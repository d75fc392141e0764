"""Memory under load, with real allocations: stock crosses the line, and under the guard it is held, or it is replaced.

The line is MLX_SHIM_MEMORY_HARD; what the process holds is counted from outside, by psutil.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import big_model
import psutil
import pytest
from harness import NEWEST, Inconclusive, Server, Stream, wait_until

MIB = 2**20
TOKENS = 300  # 32 KiB each
ENTRY = TOKENS * big_model.bytes_per_token(4096)
CONVERSATIONS = 40
PACE = 0.1  # seconds between two: what grows within the second between two looks is not seen
CACHE = ("--prompt-cache-size", "1000")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return big_model.big_kv_model(tmp_path_factory.mktemp("models") / "big")


class Scales:
    """The largest resident set of a process while it is looked at."""

    def __init__(self, server):
        self.process, self.most, self._stop = psutil.Process(server.pid), 0, threading.Event()
        self.before = self.now()
        self._thread = threading.Thread(target=self._weigh)
        self._thread.start()

    def now(self):
        return self.process.memory_info().rss

    def _weigh(self):
        while not self._stop.wait(0.02):
            try:
                self.most = max(self.most, self.now())
            except psutil.NoSuchProcess:
                return

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def text_of(answer):
    return answer[1]["choices"][0]["text"] if answer[0] == 200 else answer


def converse(server, count=CONVERSATIONS):
    """So many conversations, one after another, each of which stays in the prompt cache. What they were told.

    Every other one is served alone, not in a batch: it brings a seed.
    """
    answers = []
    for n in range(count):
        body = {"prompt": f"{n:03}" * (TOKENS // 3), "max_tokens": 4, "temperature": 0}
        body |= {"seed": n} if n % 2 else {}
        for _ in range(20):  # as a client does that is told to come back
            status, answer = server.post(body)
            if status != 503:
                break
            assert answer["error"]["code"] == "memory_pressure"
            time.sleep(0.5)
        answers.append(text_of((status, answer)))
        time.sleep(PACE)
    return answers


def warm(server):
    assert server.ready().post({"prompt": "warm", "max_tokens": 2})[0] == 200
    return psutil.Process(server.pid).memory_info().rss


def test_many_conversations(line, big, tmp_path):
    """Each is kept in the prompt cache, which is as long as the user says: what is kept goes before the memory does."""
    with Server(line, big, tmp_path / "stock", args=CACHE, environ={"MLX_SHIM": "0"}) as server:
        base = warm(server)
        soft, hard = base + 8 * ENTRY, base + 25 * ENTRY
        with Scales(server) as stock:
            expected = converse(server)
        if stock.most < hard:
            raise Inconclusive(f"stock held {stock.most / MIB:.0f} MiB, hard is {hard / MIB:.0f}")
    limits = {"MLX_SHIM_MEMORY_SOFT": str(soft), "MLX_SHIM_MEMORY_HARD": str(hard), "MLX_SHIM_DEBUG": "1"}
    with Server(line, big, tmp_path / "log", args=CACHE, environ=limits) as server:
        warm(server)
        with Scales(server) as ours:
            answers = converse(server)
        assert ours.most < hard, server.text()
        assert "of entries" in server.text()
        memory = server.get("/health")[1]["memory"]
    assert answers == expected
    assert base / 2 < memory["footprint"] < hard
    assert memory["active"] < memory["footprint"], "counted by the process itself as psutil does it"
    print(f"{line}: stock {stock.most / MIB:.0f} MiB, ours {ours.most / MIB:.0f}, hard {hard / MIB:.0f}")


def test_several_at_once(line, big, tmp_path):
    """Above hard the largest is ended and the others get their tokens; new ones are 503; below it all is as before."""
    small = {"prompt": "small", "max_tokens": 300, "temperature": 0, "stream": False}
    with Server(line, big, tmp_path / "stock", environ={"MLX_SHIM": "0"}) as server:
        base = warm(server)
        with Scales(server) as stock:
            alone = text_of(server.post(small))
            streams = [
                Stream(server, {"prompt": f"{n}" * TOKENS, "max_tokens": 400, "temperature": 0}) for n in range(5)
            ]
            assert all(stream.first.wait(60) for stream in streams)
            wait_until(lambda: stock.most > base + 12 * ENTRY, 30)
        hard = base + 8 * ENTRY
        if stock.most < hard:
            raise Inconclusive(f"stock held {stock.most / MIB:.0f} MiB, hard is {hard / MIB:.0f}")
    with Server(line, big, tmp_path / "log", environ={"MLX_SHIM_MEMORY_HARD": str(hard)}) as server:
        warm(server)
        answers = []
        poster = threading.Thread(target=lambda: answers.append(text_of(server.post(small))))
        poster.start()
        streams = [Stream(server, {"prompt": f"{n}" * TOKENS, "max_tokens": 400, "temperature": 0}) for n in range(5)]
        for stream in streams:
            stream.join(120)
        poster.join(120)
        ended = [stream for stream in streams if not stream.done]
        assert ended, server.text()
        assert re.search(r"memory: still above hard, request \d+ \(\d+ tokens\) is ended", server.text())
        for stream in ended:
            assert "memory_pressure" in stream.lines[-1] or "memory_pressure" in str(list(stream.events)[-1:])
        assert answers == [alone], "the small one was none of the largest"
        assert wait_until(lambda: server.get("/health/ready")[0] == 200, 30), server.text()
        assert "below hard again" in server.text()
        assert text_of(server.post(small)) == alone


class MemoryGroup:
    """A cgroup of v1 or v2 whose processes are killed when they hold more than so many bytes."""

    def __init__(self, name, limit):
        old = Path("/sys/fs/cgroup/memory")
        self.folder = (old if old.is_dir() else Path("/sys/fs/cgroup")) / name
        self.folder.mkdir()
        try:
            (self.folder / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
        except OSError:
            self.folder.rmdir()
            raise

    def take(self, pid):
        (self.folder / "cgroup.procs").write_text(str(pid))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        wait_until(lambda: not (self.folder / "cgroup.procs").read_text().strip(), 10)
        self.folder.rmdir()


def test_the_system_kills_stock_and_not_us(big, tmp_path):
    """In a group of the system's with room for 24 conversations, of 40 that are kept."""
    with Server(NEWEST, big, tmp_path / "base", environ={"MLX_SHIM": "0"}) as server:
        base = warm(server)
    outcome = {}
    for switch in ("0", "1"):
        limits = {"MLX_SHIM_MEMORY_SOFT": str(base + 6 * ENTRY), "MLX_SHIM_MEMORY_HARD": str(base + 16 * ENTRY)}
        with Server(NEWEST, big, tmp_path / switch, args=CACHE, environ={"MLX_SHIM": switch} | limits) as server:
            warm(server)
            try:
                group = MemoryGroup(f"mlx-lm-shim-test-{server.pid}", 24 * ENTRY)  # of what it takes from now on
            except OSError as error:
                pytest.skip(f"this machine lets nobody make a memory cgroup: {error}")
            with group:
                group.take(server.pid)
                try:
                    converse(server, 40)
                except OSError:
                    assert wait_until(lambda: not server.alive, 10)
                outcome[switch] = server.process.poll()
                server.__exit__()
    if outcome["0"] != -9:
        raise Inconclusive(f"stock was not killed: {outcome}")
    assert outcome["1"] is None, "ours lives"
