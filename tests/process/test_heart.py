"""The heart where it sees less: each way to see a death or a stall, without those above it."""

from __future__ import annotations

import textwrap

import pytest

from kit.harness import KILLER, Server, expect_zombie, wait_until
from kit.streams import Stream

SHORT = {
    "MLX_SHIM_DECODE_STALL": "3s",
    "MLX_SHIM_PREFILL_STALL": "5s",
    "MLX_SHIM_EXIT_GRACE": "10s",
}

# No queue of the server is a queue.Queue: no delivery can be seen.
OTHER_QUEUES = """
    import queue
    import mlx_lm.server as server
    server.Queue = queue.SimpleQueue
    server.main()
"""
# The wrappers that were in place are bypassed: they are never called.
BYPASSED = """
    import inspect
    import mlx_lm.server as server
    handler, generator = server.APIHandler, server.ResponseGenerator
    handler.handle_completion = inspect.unwrap(handler.handle_completion)
    generator._tokenize = inspect.unwrap(generator._tokenize)
    server.main()
"""
# No wrapper is on the loop, and an exception from it is swallowed outside, or is not.
UNWRAPPED = """
    import inspect, threading
    import mlx_lm.server as server
    generator = server.ResponseGenerator
    stock = inspect.unwrap(generator._generate)
    SWALLOW = {swallow}
    def loop(self):
        try:
            stock(self)
        except BaseException:
            if not SWALLOW:
                raise
    generator._generate = generator._run_generate = loop
    server.main()
"""


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return (str(path),)


@pytest.mark.guard("stall")
def test_a_stall_where_only_bytes_of_answers_are_seen(line, faulty, tmp_path):
    model = faulty(kind="sleep")
    entry = program(tmp_path, OTHER_QUEUES)
    with Server(
        line, model.path, tmp_path / "log", args=model.args, entry=entry, environ=SHORT
    ) as server:
        server.ready()
        assert any(
            "endless_wait is incompatible (cannot see deliveries (" in x
            for x in server.shim_lines()
        )
        guards = server.get("/health")[1]["guards"]
        assert (guards["stall"], guards["endless_wait"]) == ("degraded", "incompatible")
        stream = Stream(server, {"prompt": "x", "max_tokens": 100_000})
        assert stream.first.wait(30)
        model.fire()
        assert server.wait_exit(60) == 70
        assert "no move of the generation thread for 5 s" in server.text()
        assert not stream.join().done, "a cut answer does not look complete"


@pytest.mark.control("stall")
def test_control_of_a_stall_where_only_bytes_are_seen(line, faulty, tmp_path):
    model = faulty(kind="sleep")
    entry = program(tmp_path, OTHER_QUEUES)
    off = SHORT | {"MLX_SHIM_STALL": "0"}
    with Server(
        line, model.path, tmp_path / "log", args=model.args, entry=entry, environ=off
    ) as server:
        server.ready()
        model.fire()
        server.send_and_leave({"prompt": "x"})
        expect_zombie(server, patience=8.0)


@pytest.mark.guard("stall")
def test_a_long_answer_that_is_not_streamed_is_no_stall(line, faulty, tmp_path):
    """No byte goes out for much longer than the limit, while the generation thread moves."""
    model = faulty(kind="none", delay=0.05)
    entry = program(tmp_path, OTHER_QUEUES)
    environ = SHORT | {"MLX_SHIM_PREFILL_STALL": "2s"}
    with Server(
        line, model.path, tmp_path / "log", args=model.args, entry=entry, environ=environ
    ) as server:
        assert server.ready().post({"prompt": "x", "max_tokens": 160})[0] == 200
        assert server.alive
        assert "stalled" not in server.text()


@pytest.mark.guard("untruthful_health")
@pytest.mark.usefixtures("killable")
def test_wrappers_that_are_never_called_are_told_of(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", entry=program(tmp_path, BYPASSED)) as server:
        server.ready()
        assert server.get("/health")[1].get("unseen") is None
        for _ in range(3):
            assert server.post({"prompt": "x", "max_tokens": 1})[0] == 200
        assert wait_until(lambda: server.get("/health")[1].get("unseen"), 10)
        assert set(server.get("/health")[1]["unseen"]) == {"handlers", "tokenizing"}
        told = "untruthful_health is degraded (cannot see handlers ("
        assert any(
            told in x and "requests were served and none was seen" in x for x in server.shim_lines()
        )
        server.send_and_leave(KILLER)
        assert server.wait_exit(30) == 70


@pytest.mark.guard("generation_death")
@pytest.mark.control("generation_death")
@pytest.mark.usefixtures("killable")
@pytest.mark.parametrize("swallow", [True, False], ids=["swallowed", "uncaught"])
def test_a_death_that_no_wrapper_sees(line, tiny, tmp_path, swallow):
    entry = program(tmp_path, UNWRAPPED.replace("{swallow}", str(swallow)))
    with Server(line, tiny, tmp_path / "log", entry=entry) as server:
        server.ready().send_and_leave(KILLER)
        assert server.wait_exit(10) == 70
        reason = "its loop returned" if swallow else "the generation thread died: "
        assert any("fatal: " in x and reason in x for x in server.shim_lines())
    with Server(
        line, tiny, tmp_path / "off", entry=entry, environ={"MLX_SHIM_GENERATION_DEATH": "0"}
    ) as control:
        control.ready().send_and_leave(KILLER)
        expect_zombie(control)
