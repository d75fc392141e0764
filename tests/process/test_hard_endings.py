"""The exit comes whatever else is wrong: stderr, the hooks, many waiting clients, being PID 1."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from kit.harness import (
    KILLER,
    NEWEST,
    REPO,
    Server,
    clean_environ,
    expect_zombie,
    python_of,
    wait_until,
)
from kit.streams import Stream

pytestmark = pytest.mark.usefixtures("killable")

# A program around the stock server, as embedders and crash reporters are.
PROGRAM = """
    import sys, threading, time
    {before}
    from mlx_lm.server import main
    {after}
    main()
"""
HANGING_HOOK = "threading.excepthook = lambda args: time.sleep(10**6)"
RAISING_HOOK = "threading.excepthook = lambda args: 1 / 0"
EXITING_HOOK = "threading.excepthook = lambda args: sys.exit(3)"


def program(tmp_path, before="", after=""):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).format(before=before, after=after))
    return (str(path),)


def killed(server):
    """Seconds from the killer request to the exit, with the status asserted."""
    server.ready().send_and_leave(KILLER)
    start = time.monotonic()
    assert server.wait_exit(30) == 70
    return time.monotonic() - start


@pytest.mark.guard("generation_death")
@pytest.mark.parametrize(
    "hook", [HANGING_HOOK, RAISING_HOOK, EXITING_HOOK], ids=["hangs", "raises", "exits"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_threading_excepthook_of_the_program(line, tiny, tmp_path, hook, when):
    with Server(line, tiny, tmp_path / "log", entry=program(tmp_path, **{when: hook})) as server:
        print(f"{line}: {killed(server):.2f} s")
        assert any("fatal:" in x for x in server.shim_lines())


@pytest.mark.control("generation_death")
def test_control_for_hooks(line, tiny, tmp_path):
    entry = program(tmp_path, before=RAISING_HOOK)
    with Server(line, tiny, tmp_path / "log", entry=entry, environ={"MLX_SHIM": "0"}) as server:
        server.ready().send_and_leave(KILLER)
        expect_zombie(server)


UNKNOWN_FACTS = """
def broken(*_):
    raise RuntimeError("no facts")
modules = sys.modules.items()
next(m for name, m in modules if name.endswith("shim.engine.crash_report")).facts = broken
"""


@pytest.mark.guard("generation_death")
def test_a_report_that_cannot_be_made(tiny, tmp_path):
    """The clients are told all the same, the line is said, and the status is a death's."""
    reports = tmp_path / "reports"
    entry = program(tmp_path, after=UNKNOWN_FACTS)
    environ = {"MLX_SHIM_REPORT_DIR": str(reports), "MLX_SHIM_EXIT_GRACE": "10s"}
    with Server(NEWEST, tiny, tmp_path / "log", entry=entry, environ=environ) as server:
        status, answer = server.ready().post(KILLER)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert server.wait_exit(30) == 70
        assert "could not gather the facts for a report: RuntimeError('no facts')" in server.text()
        assert sum("fatal: the generation thread died" in x for x in server.shim_lines()) == 1
        assert not reports.exists()


@pytest.mark.guard("generation_death")
def test_a_crash_reporter_installed_after_us_still_sees_the_death(line, tiny, tmp_path):
    hook = (
        "threading.excepthook = lambda args: print('REPORTED', args.exc_type.__name__, flush=True)"
    )
    with Server(line, tiny, tmp_path / "log", entry=program(tmp_path, after=hook)) as server:
        killed(server)
        assert server.text().count("REPORTED") == 1


@pytest.mark.guard("generation_death")
def test_stderr_closed(line, tiny, tmp_path):
    with Server(
        line, tiny, tmp_path / "log", prefix=("sh", "-c", 'exec "$@" 2>&-', "sh")
    ) as server:
        killed(server)


@pytest.mark.guard("generation_death")
def test_stderr_a_dead_pipe(line, tiny, tmp_path):
    reader, writer = os.pipe()
    with Server(line, tiny, tmp_path / "log", stderr=writer) as server:
        os.close(writer)
        server.ready()
        os.close(reader)
        server.send_and_leave(KILLER)
        assert server.wait_exit(30) == 70


@pytest.mark.guard("generation_death")
def test_stderr_a_full_pipe(line, tiny, tmp_path):
    """The traceback's printer never returns; stock's log lines, which would block too, are off."""
    reader, writer = os.pipe()
    with Server(
        line, tiny, tmp_path / "log", stderr=writer, args=("--log-level", "CRITICAL")
    ) as server:
        server.ready()
        os.set_blocking(writer, False)
        assert fill(writer) > 0
        os.set_blocking(writer, True)
        server.send_and_leave(KILLER)
        assert server.wait_exit(30) == 70
    os.close(reader)
    os.close(writer)


def fill(writer):
    filled = 0
    try:
        while True:
            filled += os.write(writer, b"x")
    except BlockingIOError:
        return filled


@pytest.mark.guard("generation_death")
def test_two_hundred_clients_waiting(line, faulty, tmp_path):
    model = faulty(kind="RuntimeError", delay=0.05)
    with Server(line, model.path, tmp_path / "log", args=model.args) as server:
        server.ready()
        streams = [Stream(server, {"prompt": "x", "max_tokens": 1000}) for _ in range(200)]
        assert wait_until(lambda: any(s.lines for s in streams), 60)
        time.sleep(1)
        model.fire()
        start = time.monotonic()
        assert server.wait_exit(30) == 70
        print(f"{line}: {time.monotonic() - start:.2f} s with 200 clients")
        for stream in streams:
            stream.join()


@pytest.mark.guard("generation_death")
@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are Linux's")
def test_as_pid_1(line, tiny, tmp_path):
    prefix = (
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    )
    with Server(line, tiny, tmp_path / "log", prefix=prefix) as server:
        killed(server)


@pytest.mark.guard("generation_death")
def test_no_new_thread_can_be_started(line, faulty, tmp_path):
    """A process that is out of threads can die like this: its end must not need another thread."""
    model = faulty(kind="out_of_threads")
    with Server(line, model.path, tmp_path / "log", args=model.args) as server:
        server.ready()
        model.fire()
        server.send_and_leave({"prompt": "x"})
        assert server.wait_exit(30) == 70


@pytest.mark.parametrize(
    "entry", [("-m", "mlx_lm.server"), ("-m", "mlx_lm", "server"), ("-m", "mlx_lm", "generate")]
)
def test_nothing_is_said_where_no_server_starts(line, entry):
    """Least of all on stdout."""
    outputs = [
        subprocess.run(
            [python_of(line), *entry, "--help"],
            capture_output=True,
            check=True,
            env=clean_environ(**environ),
        )
        for environ in ({"PYTHONPATH": str(REPO)}, {"PYTHONPATH": str(REPO), "MLX_SHIM": "0"}, {})
    ]
    assert len({(o.stdout, o.stderr) for o in outputs}) == 1
