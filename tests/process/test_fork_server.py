"""A server from the fork server starts like one that has an interpreter of its own."""

from __future__ import annotations

import json
import signal

import pytest

from kit.harness import Server, wait_until

# In place of mlx_lm. It writes down all that a program can see of its start.
LOOKS = """
import json, os, signal, sys
print("SITE", flush=True) if "sitecustomize" in sys.modules else None
json.dump({
    "path": sys.path, "argv": sys.argv, "orig_argv": sys.orig_argv[1:],
    "cwd": os.getcwd(), "name": __name__,
    "environ": {k: v for k, v in os.environ.items() if k not in ("_", "LC_CTYPE")},
    "signals": [
        str(signal.getsignal(n))
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    ],
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "descriptors": sorted(n for n in os.listdir("/dev/fd") if int(n) < 3),
    "tty": [sys.stdin.isatty(), sys.stderr.isatty()],
    "input": sys.stdin.read(),
    "heavy": [m for m in ("mlx_lm.server", "mlx.core", "shim", "wrapt") if m in sys.modules],
}, open("seen.json", "w"))
"""


@pytest.fixture
def stand_in(tmp_path):
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").touch()
    (tmp_path / "mlx_lm" / "__main__.py").write_text(LOOKS)
    (tmp_path / "sitecustomize.py").touch()
    return {"PYTHONPATH": str(tmp_path), "MLX_SHIM_X": "x"}


def test_it_sees_what_a_fresh_one_sees(line, stand_in, tmp_path):
    seen = []
    for fresh in (True, False):
        log = tmp_path / f"log-{fresh}"
        with Server(line, "m", log, environ=stand_in, port=9, fresh=fresh) as server:
            assert server.wait_exit() == 0, server.text()
            assert server.text() == "SITE\n"
        seen.append(json.loads((tmp_path / "seen.json").read_text()))
    for one in seen:
        one["argv"][0] = one["argv"][0].rpartition("/mlx_lm/")[2]
    assert seen[0] == seen[1]
    assert "MLX_SHIM_X" in seen[1]["environ"]


def test_a_file_sees_what_a_fresh_one_sees(line, stand_in, tmp_path):
    file = tmp_path / "program" / "program.py"
    file.parent.mkdir()
    file.write_text(
        LOOKS + "\nprint(sorted(n for n in globals()), __file__, __spec__, flush=True)\n"
    )
    seen = []
    for fresh in (True, False):
        log = tmp_path / f"log-{fresh}"
        with Server(
            line, "m", log, entry=(str(file),), environ=stand_in, port=9, fresh=fresh
        ) as server:
            assert server.wait_exit() == 0, server.text()
            seen.append([server.text(), json.loads((tmp_path / "seen.json").read_text())])
    assert seen[0] == seen[1]


def test_its_end_is_told_as_that_of_a_process(line, stand_in, tmp_path):
    (tmp_path / "mlx_lm" / "__main__.py").write_text("import time; time.sleep(600)")
    for number in (signal.SIGTERM, signal.SIGKILL):
        with Server(line, None, tmp_path / "log", environ=stand_in) as server:
            assert server.alive
            server.process.send_signal(number)
            assert server.wait_exit() == -number
    with Server(line, None, tmp_path / "log", environ=stand_in) as left:
        assert not wait_until(lambda: not left.alive, 0.5)
    assert left.process.poll() == -signal.SIGKILL
