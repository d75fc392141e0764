"""Memory under load, with real allocations: stock crosses the line, a guarded server does not.

The line is MLX_SHIM_MEMORY_HARD; what the process holds is counted from outside, by psutil.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from kit.harness import NEWEST, Inconclusive, Server, wait_until
from kit.models import big_model
from kit.scales import MIB, Scales, patient, text_of, warm
from kit.streams import Stream

# Each takes 32 KiB.
TOKENS = 300
ENTRY = TOKENS * big_model.bytes_per_token(4096)
CONVERSATIONS = 40
# Seconds between two. The guard does not see what grows within the second between two looks.
PACE = 0.1
CACHE = ("--prompt-cache-size", "1000")


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return big_model.big_kv_model(tmp_path_factory.mktemp("models") / "big")


@pytest.fixture(scope="module")
def outside(big, tmp_path_factory):
    """By line, for stock in no memory group: its first and its highest figure, and the answers."""
    seen = {}

    def of(line):
        if line not in seen:
            log = tmp_path_factory.mktemp("stock") / "log"
            with Server(line, big, log, args=CACHE, environ={"MLX_SHIM": "0"}) as server:
                base = warm(server)
                with Scales(server) as scales:
                    answers = converse(server)
            assert len(set(answers)) > CONVERSATIONS / 4, (
                "a text that is always the same tells nothing"
            )
            seen[line] = base, scales.most, answers
        return seen[line]

    return of


def converse(server):
    """The answers of one conversation after another; each conversation stays in the prompt cache.

    Every other one is served alone, not in a batch: it brings a seed.
    """
    answers = []
    for n in range(CONVERSATIONS):
        body = {"prompt": f"{n:03}" * (TOKENS // 3), "max_tokens": 4, "temperature": 0}
        body |= {"seed": n} if n % 2 else {}
        answers.append(text_of(patient(server, body)))
        time.sleep(PACE)
    return answers


@pytest.mark.slow
@pytest.mark.guard("exhausted_memory")
@pytest.mark.control("exhausted_memory")
def test_many_conversations(line, big, outside, tmp_path):
    """The prompt cache keeps each, up to the user's limit. Its entries go first."""
    base, most, expected = outside(line)
    soft, hard = base + 8 * ENTRY, base + 25 * ENTRY
    if most < hard:
        raise Inconclusive(f"stock held {most / MIB:.0f} MiB, hard is {hard / MIB:.0f}")
    limits = {
        "MLX_SHIM_MEMORY_SOFT": str(soft),
        "MLX_SHIM_MEMORY_HARD": str(hard),
        "MLX_SHIM_DEBUG": "1",
    }
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
    print(f"{line}: stock {most / MIB:.0f} MiB, ours {ours.most / MIB:.0f}, hard {hard / MIB:.0f}")


SMALL = {"prompt": "small", "max_tokens": 300, "temperature": 0}
LARGE = [
    {"prompt": f"{n} at once " * (TOKENS // 10), "max_tokens": 350, "temperature": 0}
    for n in range(5)
]
# Bytes of all of these once their prompts are done, in steps of STEP tokens. In a batch each takes
# as much as the longest.
BATCH = (len(LARGE) + 1) * 2 * big_model.STEP * big_model.bytes_per_token(4096)


def at_once(server):
    """The streams of the small one and the large ones, sent soon after each other."""
    streams = []
    for body in (SMALL, *LARGE):
        streams.append(Stream(server, body))
        time.sleep(4 * PACE)
    return [stream.join(120) for stream in streams]


@pytest.mark.slow
@pytest.mark.guard("exhausted_memory")
@pytest.mark.control("exhausted_memory")
def test_several_at_once(line, big, tmp_path):
    """Above hard the largest is ended, the others get their tokens, and new ones get 503.

    Below hard all is as before. An answer here does not depend on the others in its batch: at
    temperature 0, on the CPU, each row of a product is summed up for itself, and padding is 0.
    """
    with Server(line, big, tmp_path / "stock", environ={"MLX_SHIM": "0"}) as server:
        hard = warm(server) + 8 * ENTRY
        # All of it may be there within the second between two looks: while a batch grows the former
        # is still there too, and MLX keeps the one before that.
        bound = hard + 3 * BATCH
        alone = text_of(server.post(SMALL))
        with Scales(server) as stock:
            expected = at_once(server)
        assert all(stream.done for stream in expected)
        assert expected[0].text == alone
        if stock.most < bound:
            raise Inconclusive(
                f"stock held {stock.most / MIB:.0f} MiB, hard is {hard / MIB:.0f}, "
                f"{bound / MIB:.0f} allowed"
            )
    with Server(line, big, tmp_path / "log", environ={"MLX_SHIM_MEMORY_HARD": str(hard)}) as server:
        warm(server)
        with Scales(server) as ours:
            streams = at_once(server)
        assert ours.most < bound, server.text()
        ended = [stream for stream in streams if not stream.done]
        assert ended, server.text()
        assert re.search(
            r"memory: still above hard, request \d+ \(\d+ tokens\) is ended", server.text()
        )
        codes = []
        for stream in ended:
            told = json.loads(stream.lines[-1]) if stream.status != 200 else list(stream.events)[-1]
            codes.append(told["error"]["code"])
        assert set(codes) <= {"memory_pressure", "context_length_exceeded"}
        assert codes.count("context_length_exceeded") <= 1, (
            "the last of them at most, as too much by itself"
        )
        for stream, whole in zip(streams, expected, strict=True):
            assert (
                (whole.text == stream.text) if stream.done else whole.text.startswith(stream.text)
            )
        assert streams[0].done, "the small one was none of the largest"
        assert wait_until(lambda: server.get("/health/ready")[0] == 200, 30), server.text()
        assert "below hard again" in server.text()
        assert text_of(server.post(SMALL)) == alone
    print(
        f"{line}: stock {stock.most / MIB:.0f} MiB, ours {ours.most / MIB:.0f}, "
        f"hard {hard / MIB:.0f}, {len(ended)} ended"
    )


class MemoryGroup:
    """A cgroup of v1 or v2. Its processes are killed when they hold more than so many bytes."""

    def __init__(self, name, limit):
        old = Path("/sys/fs/cgroup/memory")
        self.folder = (old if old.is_dir() else Path("/sys/fs/cgroup")) / name
        self.folder.mkdir()
        try:
            (self.folder / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(
                str(limit)
            )
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


@pytest.mark.slow
@pytest.mark.guard("exhausted_memory")
@pytest.mark.control("exhausted_memory")
def test_the_system_kills_stock_and_not_us(big, outside, tmp_path):
    """In a memory group with room for 24 of the 40 conversations."""
    base, _, expected = outside(NEWEST)
    outcome, answers = {}, {}
    for switch in ("0", "1"):
        limits = {
            "MLX_SHIM_MEMORY_SOFT": str(base + 6 * ENTRY),
            "MLX_SHIM_MEMORY_HARD": str(base + 16 * ENTRY),
        }
        with Server(
            NEWEST, big, tmp_path / switch, args=CACHE, environ={"MLX_SHIM": switch} | limits
        ) as server:
            warm(server)
            try:
                # Counts what the server takes from now on.
                group = MemoryGroup(f"mlx-lm-shim-test-{server.pid}", 24 * ENTRY)
            except OSError as error:
                pytest.skip(f"this machine lets nobody make a memory cgroup: {error}")
            with group:
                group.take(server.pid)
                try:
                    answers[switch] = converse(server)
                except OSError:
                    assert wait_until(lambda: not server.alive, 10)
                outcome[switch] = server.process.poll()
                server.__exit__()
    if outcome["0"] != -9:
        raise Inconclusive(f"stock was not killed: {outcome}")
    assert outcome["1"] is None, "ours lives"
    assert answers["1"] == expected, "and said what it says where there is room for all"
