"""A limit ends an idle process with 75, and a busy one only at twice the limit, by a drain."""

from __future__ import annotations

import json
import textwrap
import time

import pytest

from kit.harness import NEWEST, Inconclusive, Server, wait_until
from kit.streams import Stream


def posts(server, count):
    for n in range(count):
        assert server.post({"prompt": f"request {n}", "max_tokens": 1})[0] == 200


def recycled(server):
    (said,) = [x for x in server.shim_lines() if "stopped: " in x]
    return said


@pytest.mark.guard("grown_process")
def test_after_so_many_requests_once_it_is_idle(line, faulty, tmp_path):
    """Four are above 3 whatever random factor applies, and below 6."""
    model = faulty(kind="none", delay=0.02)
    environ = {"MLX_SHIM_RECYCLE_REQUESTS": "3", "MLX_SHIM_REPORT_DIR": str(tmp_path / "reports")}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": "busy", "max_tokens": 500})
        assert stream.first.wait(30)
        posts(server, 2)
        time.sleep(2.5)
        assert server.get("/health")[1]["status"] == "ok", "a busy server goes on"
        model.hurry()
        assert stream.join().done
        assert server.wait_exit(30) == 75
        assert "recycled at 4 requests, MLX_SHIM_RECYCLE_REQUESTS being 3 requests" in recycled(
            server
        )
        assert "its footprint was" in recycled(server)
        assert "exit 75" in recycled(server)
    (report,) = (tmp_path / "reports").iterdir()
    content = json.loads(report.read_text())
    assert content["exit"] == 75
    assert content["recycled"]["footprint"] >= content["recycled"]["footprint_model_up"] > 2**20


@pytest.mark.guard("grown_process")
def test_a_busy_one_at_twice_the_limit(faulty, tmp_path):
    model = faulty(kind="none", delay=0.02)
    environ = {
        "MLX_SHIM_RECYCLE_REQUESTS": "2",
        "MLX_SHIM_DRAIN": "5s",
        "MLX_SHIM_EXIT_GRACE": "10s",
    }
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": "busy", "max_tokens": 100_000})
        assert stream.first.wait(30)
        posts(server, 3)
        assert wait_until(lambda: server.get("/health")[1]["status"] == "draining", 10)
        assert server.post({"prompt": "x"})[0] == 503
        stream.join()
        assert any("shutting_down" in x for x in stream.lines)
        assert server.wait_exit(30) == 75
        assert "1 cut short" in recycled(server)


GROWING = """
    import threading, time
    from pathlib import Path
    def grow():
        time.sleep(3)
        global kept
        while not Path({trigger!r}).exists():
            time.sleep(0.1)
        kept = b"x" * (1200 << 20)
    threading.Thread(target=grow, daemon=True).start()
    from mlx_lm.server import main
    main()
"""


@pytest.mark.guard("grown_process")
def test_a_footprint(tiny, tmp_path):
    """1200 MiB are above 1 GiB whatever random factor applies, and below 2 GiB."""
    trigger, program = tmp_path / "trigger", tmp_path / "program.py"
    program.write_text(textwrap.dedent(GROWING).format(trigger=str(trigger)))
    environ = {"MLX_SHIM_RECYCLE_MEMORY": "1G"}
    with Server(NEWEST, tiny, tmp_path / "log", entry=(str(program),), environ=environ) as server:
        server.ready()
        time.sleep(2)
        assert server.alive
        trigger.touch()
        assert server.wait_exit(30) == 75
        assert "recycled at a footprint of 1." in recycled(server)


@pytest.mark.guard("grown_process")
@pytest.mark.parametrize(
    ("environ", "figure"),
    [
        ({"MLX_SHIM_RECYCLE_AGE": "1s", "MLX_SHIM_RECYCLE_MEMORY": "1M"}, "s of age"),
        ({"MLX_SHIM_RECYCLE_TOKENS": "1"}, "tokens"),
    ],
    ids=["age", "tokens"],
)
def test_the_other_limits(tiny, tmp_path, environ, figure):
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        if "tokens" in figure:
            server.ready()
        assert server.wait_exit() == 75
        assert figure in recycled(server)
        ignored = any("MLX_SHIM_RECYCLE_MEMORY is ignored" in x for x in server.shim_lines())
        assert ignored == ("MLX_SHIM_RECYCLE_MEMORY" in environ), (
            "it would be recycled before it could serve"
        )


@pytest.mark.control("grown_process")
def test_control_stock_serves_on(tiny, tmp_path):
    environ = {"MLX_SHIM_RECYCLE_REQUESTS": "1", "MLX_SHIM_GROWN_PROCESS": "0"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        posts(server.ready(), 4)
        time.sleep(2.5)
        if not server.alive:
            raise Inconclusive(f"it ended by itself with {server.process.returncode}")
