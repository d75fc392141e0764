"""A look at memory: its cost, that it waits for nothing and starts nothing, who looks how often."""

from __future__ import annotations

import json
import statistics
import subprocess
import time

import pytest

from kit.harness import NEWEST, REPO, Server, clean_environ, python_of
from kit.streams import Stream

# Seconds of a core. At one look a second that is 0.1 %.
MOST = 0.001


@pytest.mark.guard("exhausted_memory")
def test_a_look_costs_little_waits_for_no_product_and_starts_no_process(line):
    """The guard's own look, with the mlx of either line.

    The product takes seconds. A look that waited for it would take as long.
    """
    program = REPO / "tests" / "kit" / "programs" / "memory_looks.py"
    done = subprocess.run(
        [python_of(line), str(program)],
        env=clean_environ(),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    seen = json.loads(done.stdout)
    looks, took = seen["looks"], seen["took"]
    print(
        f"{line}: {seen['below'] * 1e6:.0f} us below soft, {seen['above'] * 1e6:.0f} above; "
        f"beside {took:.1f} s of MLX "
        f"{len(looks)} looks, the longest {max(looks) * 1e3:.0f} ms"
    )
    assert seen["below"] < MOST
    assert seen["above"] < MOST
    assert took > 1.5
    assert len(looks) > 30
    assert max(looks) < took / 3, (
        "on a busy machine a look may lose the processor, but not for so long"
    )
    assert statistics.median(looks) < 0.05
    assert seen["heard"], "a process that is started is noticed"
    assert seen["started"] == []


@pytest.mark.guard("exhausted_memory")
def test_once_a_second_by_the_watchdog_whatever_is_generated(faulty, tmp_path):
    """No other thread looks, while some hundred tokens are made, so no look delays them."""
    model = faulty(kind="none", delay=0.01)
    entry = (str(REPO / "tests" / "kit" / "programs" / "counted_looks.py"),)
    environ = {"MLX_SHIM_MEMORY_SOFT": "90%", "MLX_SHIM_MEMORY_HARD": "95%"}
    with Server(
        NEWEST, model.path, tmp_path / "log", entry=entry, args=model.args, environ=environ
    ) as server:
        server.ready().post({"prompt": "what is learnt once is learnt", "max_tokens": 2})
        before, begun = server.log.stat().st_size, time.monotonic()
        stream = Stream(server, {"prompt": "x", "max_tokens": 300}).join()
        seconds = time.monotonic() - begun
        said = server.log.read_text()[before:]
    assert stream.done
    assert len(stream.lines) > 100
    looks = [line.removeprefix("LOOK ") for line in said.splitlines() if line.startswith("LOOK ")]
    assert set(looks) == {"mlx-shim-watchdog"}
    assert 1 <= len(looks) <= seconds + 2
    assert "START " not in said
    print(f"{len(looks)} looks in {seconds:.1f} s")
