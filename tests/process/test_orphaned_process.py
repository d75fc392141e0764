"""When main ends while the generation thread lives, the process ends, whatever the reason.

A model that never loads is 78, not 70.
"""

from __future__ import annotations

import json
import shutil
import signal
import textwrap
import time

import pytest

from kit.harness import Inconclusive, Server, taken_port, wait_until
from kit.streams import Stream


def fatal_lines(server):
    return [x for x in server.shim_lines() if "fatal:" in x]


@pytest.fixture
def port():
    with taken_port() as port:
        yield port


@pytest.mark.guard("orphaned_process")
@pytest.mark.control("orphaned_process")
def test_port_taken_is_71(line, tiny, tmp_path, port):
    with Server(line, tiny, tmp_path / "log", port=port) as server:
        assert server.wait_exit() == 71
        (said,) = fatal_lines(server)
        assert "could not listen: OSError: [Errno" in said
        assert "Traceback" in server.text(), "Python's own account stays in the log"
    with Server(
        line, tiny, tmp_path / "control", port=port, environ={"MLX_SHIM_ORPHANED_PROCESS": "0"}
    ) as server:
        expect_unreachable_for_ever(server)
    with Server(line, tiny, tmp_path / "stock", port=port, environ={"MLX_SHIM": "0"}) as server:
        expect_unreachable_for_ever(server)


def expect_unreachable_for_ever(server):
    assert wait_until(lambda: "OSError: [Errno" in server.text(), 60), server.text()
    time.sleep(3)
    if not server.alive:
        raise Inconclusive(f"stock ended by itself with {server.process.returncode}")


def broken_weights(tiny, folder):
    shutil.copytree(tiny, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def missing_weights(tiny, folder):
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").unlink()
    return folder


def unknown_architecture(tiny, folder):
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "no_such_model"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.guard("generation_death")
@pytest.mark.control("generation_death")
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda tiny, folder: "/nonexistent", "/nonexistent"),
        (broken_weights, "safetensors"),
        (missing_weights, "No safetensors found"),
        (unknown_architecture, "no_such_model"),
    ],
    ids=["nonexistent", "broken weights", "missing weights", "unknown architecture"],
)
def test_a_model_that_cannot_be_loaded_is_78(line, tiny, tmp_path, make, cause):
    model = make(tiny, tmp_path / "model")
    with Server(line, model, tmp_path / "log") as server:
        assert server.wait_exit() == 78
        (said,) = fatal_lines(server)
        assert f"the model {model} could not be loaded" in said
        assert cause in said
    with Server(line, model, tmp_path / "control", environ={"MLX_SHIM": "0"}) as server:
        assert wait_until(lambda: "Traceback" in server.text(), 60), server.text()
        time.sleep(3)
        if not server.alive:
            raise Inconclusive(f"stock ended by itself with {server.process.returncode}")


PROGRAM = """
    import sys, threading, time
    import mlx_lm.server as server
    sys.argv[1:] = []
    # The arguments of the command line that ModelProvider uses.
    class Args:
        model = None; adapter_path = None; draft_model = None; trust_remote_code = False
        chat_template = ""; pipeline = False; use_default_chat_template = False
        prompt_cache_bytes = None; kv_bits = None
    generator = server.ResponseGenerator(server.ModelProvider(Args()), server.LRUPromptCache(10))
    time.sleep(0.5)
    {ending}
"""


@pytest.mark.guard("orphaned_process")
@pytest.mark.control("orphaned_process")
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("raise RuntimeError('main is lost')", 70),
        ("pass", 70),
        ("sys.exit(0)", 70),
        ("generator.stop_and_join()", 0),
        ("generator.stop_and_join(); raise RuntimeError('after an orderly stop')", 1),
    ],
)
def test_a_program_whose_main_ends(line, tmp_path, ending, status):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(ending=ending))
    with Server(line, None, tmp_path / "log", entry=(str(program),)) as server:
        assert server.wait_exit() == status, server.text()
        assert len(fatal_lines(server)) == (status == 70)
    if status == 70:
        with Server(
            line, None, tmp_path / "control", entry=(str(program),), environ={"MLX_SHIM": "0"}
        ) as server:
            time.sleep(6)
            if not server.alive:
                raise Inconclusive(
                    f"stock ended by itself with {server.process.returncode}: {server.text()}"
                )


@pytest.mark.guard("orphaned_process")
def test_an_orderly_stop_is_no_death(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log") as server:
        server.ready().process.send_signal(signal.SIGINT)
        assert server.wait_exit() == 0
        assert fatal_lines(server) == []


@pytest.mark.guard("orphaned_process")
def test_an_orderly_stop_with_a_stream_open_is_no_death(line, tiny, tmp_path):
    # Stock's own stop, whose teardown aborts now and then.
    environ = {"MLX_SHIM_ABRUPT_STOP": "0"}
    with Server(line, tiny, tmp_path / "log", environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        stream.first.wait(60)
        server.process.send_signal(signal.SIGINT)
        server.wait_exit()
        assert fatal_lines(server) == []
