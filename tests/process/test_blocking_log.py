"""A log that cannot be written costs no request: six faults, and what stock does at them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import http.client
import os
import pty
import re
import select
import socket
import textwrap
import threading
import time

import pytest

from kit import harness
from kit.harness import KILLER, LINES, Inconclusive, Server, wait_until


@pytest.fixture(autouse=True)
def at_work(monkeypatch):
    """The guard is on, as it is for users."""
    monkeypatch.delitem(harness.always, "MLX_SHIM_BLOCKING_LOG")


REQUESTS = 300
COMPLETIONS = 10
OFF = {"MLX_SHIM_BLOCKING_LOG": "0"}
SMALL_QUEUE = {"MLX_SHIM_LOG_QUEUE": "64K"}
# Its access line is of some 560 bytes: 300 of them fill the smallest queue and a pipe of 64 KiB.
LONG_PATH = "/" + "x" * 500
# What a program does to sys.stderr before it starts the server.
PROGRAM = """
    import sys
    from mlx_lm.server import main
    {0}
    main()
"""
# Once the server serves: what stock logs before would end it.
CLOSE = """
import socketserver
stock = socketserver.BaseServer.serve_forever
def serve_forever(self, *args):
    sys.stderr.close()
    stock(self, *args)
socketserver.BaseServer.serve_forever = serve_forever
"""


class Fault:
    """A server's stderr, and how it fails once the server listens."""

    # Whether no line can be written.
    loses_all = True

    def __init__(self, folder):
        self.arguments = {}

    def strike(self):
        """Do nothing more: the fault is there from the start."""


class Closed(Fault):
    statement = CLOSE

    def __init__(self, folder):
        path = folder / "program.py"
        path.write_text(textwrap.dedent(PROGRAM).format(self.statement))
        self.arguments = {"entry": (str(path),)}


class Missing(Closed):
    statement = "sys.stderr = None"


class FullDisk(Fault):
    def __init__(self, folder):
        self.arguments = {"stderr": os.open("/dev/full", os.O_WRONLY)}


class DeadReader(Fault):
    def __init__(self, folder):
        self.reader, writer = os.pipe()
        self.arguments = {"stderr": writer}

    def strike(self):
        os.close(self.arguments["stderr"])
        os.close(self.reader)


class UnreadPipe(DeadReader):
    loses_all = False

    def strike(self):
        os.close(self.arguments["stderr"])


class LostTerminal(DeadReader):
    def __init__(self, folder):
        self.reader, terminal = pty.openpty()
        self.arguments = {"stderr": terminal}


FAULTS = [Closed, Missing, FullDisk, DeadReader, UnreadPipe, LostTerminal]
# The two lines of mlx-lm in turn: they log by the same code, Python's own.
ON_LINES = [(kind, LINES[n % 2]) for n, kind in enumerate(FAULTS)]


@contextlib.contextmanager
def struck(fault, line, model, folder, **environ):
    """A server that listens, and whose stderr then fails."""
    with Server(line, model, folder / "log", environ=environ, **fault.arguments) as server:
        assert wait_until(lambda: listens(server), 120), server.text()
        fault.strike()
        yield server


def listens(server):
    assert server.alive, server.text()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 5):
        return True
    return False


def status_of(server, path="/health", timeout=30.0):
    """The status of a GET; 0 if no answer came."""
    try:
        return server.get(path, timeout=timeout)[0]
    except (OSError, http.client.HTTPException):
        return 0


def ask(server, count, path=LONG_PATH, threads=4):
    """The statuses of so many GETs."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return set(pool.map(lambda _: status_of(server, path), range(count)))


def shrink(pipe):
    """Have a pipe take 4 KiB, where the system can do that."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)


def fill(pipe):
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 512)
    os.set_blocking(pipe, True)


@pytest.mark.guard("blocking_log")
@pytest.mark.usefixtures("killable")
@pytest.mark.parametrize(("kind", "line"), ON_LINES)
def test_every_request_is_answered_and_a_death_is_no_later(kind, line, tiny, tmp_path):
    fault = kind(tmp_path)
    with struck(fault, line, tiny, tmp_path, **SMALL_QUEUE) as server:
        server.ready()
        assert ask(server, REQUESTS) == {404}
        for n in range(COMPLETIONS):
            assert server.post({"prompt": f"{n}", "max_tokens": 1})[0] == 200
        lost = server.get("/health")[1]["counters"]["lost_log_lines"]
        assert lost >= REQUESTS if fault.loses_all else lost > 0
        server.send_and_leave(KILLER)
        start = time.monotonic()
        assert server.wait_exit(30) == 70
        assert time.monotonic() - start < 5


@pytest.mark.control("blocking_log")
@pytest.mark.parametrize(("kind", "line"), ON_LINES)
def test_control_stock_answers_nothing(kind, line, tiny, tmp_path):
    fault = kind(tmp_path)
    with struck(fault, line, tiny, tmp_path, **OFF) as server:
        if not fault.loses_all:
            # Until a line finds no room in the pipe.
            wait_until(lambda: status_of(server, LONG_PATH, timeout=3) == 0, 60, step=0)
        statuses = {status_of(server, LONG_PATH, timeout=3) for _ in range(1 + fault.loses_all)}
        if statuses != {0} or not server.alive:
            raise Inconclusive(f"stock answered {statuses}")


@pytest.mark.guard("blocking_log")
@pytest.mark.control("blocking_log")
def test_a_start_on_a_full_pipe(tiny, tmp_path):
    """As for a server that is started again on the pipe of the one before. Stock never listens."""
    reader, writer = os.pipe()
    fill(writer)
    with (
        Server(LINES[0], tiny, tmp_path / "off", stderr=writer, environ=OFF) as stock,
        Server(LINES[0], tiny, tmp_path / "on", stderr=writer) as server,
    ):
        server.ready()
        if wait_until(lambda: listens(stock), 2):
            raise Inconclusive("stock listens")
    os.close(reader)
    os.close(writer)


def lines_of(text):
    return [int(n) for n in re.findall(rb"GET /number/(\d+)/x+ HTTP", text)]


class Reader:
    """Reads a pipe from now on, until it is closed at its other end."""

    def __init__(self, fd):
        self.fd, self.text = fd, b""
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while select.select([self.fd], [], [], 120)[0]:
            piece = os.read(self.fd, 1 << 16)
            if not piece:
                return
            self.text += piece


@pytest.mark.guard("blocking_log")
@pytest.mark.usefixtures("killable")
def test_a_reader_that_comes_late_finds_all_in_order(line, tiny, tmp_path):
    """All that had room, then how many had not, then what comes after, and the last words last."""
    fault = UnreadPipe(tmp_path)
    shrink(fault.arguments["stderr"])
    path = "/number/{}/" + "x" * 500
    with struck(fault, line, tiny, tmp_path, **SMALL_QUEUE) as server:
        server.ready()
        for n in range(REQUESTS):
            assert status_of(server, path.format(n)) == 404
        lost = server.get("/health")[1]["counters"]["lost_log_lines"]
        reader = Reader(fault.reader)
        assert wait_until(lambda: b"are lost here" in reader.text, 10)
        assert status_of(server, path.format(9999)) == 404
        assert wait_until(lambda: b"/number/9999" in reader.text, 10)
        # /health has a line of its own, and is among the lost.
        assert b"mlx-lm-shim: %d lines of the log are lost here: " % (lost + 1) in reader.text
        server.send_and_leave(KILLER)
        assert server.wait_exit(30) == 70
    reader.thread.join()
    numbers = lines_of(reader.text)
    assert numbers[:-1] == list(range(len(numbers) - 1))
    assert len(numbers) - 1 + lost == REQUESTS
    said = reader.text.decode().splitlines()
    # After them may come the access line of a client that was told.
    begin = said.index("Traceback (most recent call last):")
    (verdict,) = [text for text in said[begin:] if text.startswith("mlx-lm-shim: fatal: ")]
    assert verdict.endswith("exit 70")


CHATTY = """
    import logging, sys, threading, warnings
    import mlx_lm.server as server
    from tqdm import tqdm
    # It holds sys.stderr, long before the server starts.
    logging.getLogger().addHandler(logging.StreamHandler())
    stock = server.APIHandler.do_GET
    def do_GET(self):
        bar = tqdm(total=2, desc="x" * 4000)
        warnings.warn("w" * 4000, stacklevel=1)
        warnings.resetwarnings()
        warnings.simplefilter("always")
        logging.warning("l" * 4000)
        print("p" * 4000, file=sys.stderr)
        bar.update(2)
        bar.close()
        stock(self)
    server.APIHandler.do_GET = do_GET
    server.main()
"""


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        pytest.param(LINES[0], {}, marks=pytest.mark.guard("blocking_log")),
        pytest.param(LINES[0], OFF, marks=pytest.mark.control("blocking_log")),
    ],
    ids=["guarded", "stock"],
)
def test_logging_warnings_and_progress_bars(line, tiny, tmp_path, environ):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(CHATTY))
    fault = UnreadPipe(tmp_path)
    fault.arguments["entry"] = (str(path),)
    with struck(fault, line, tiny, tmp_path, **SMALL_QUEUE, **environ) as server:
        if not environ:
            server.ready()
            assert {status_of(server) for _ in range(20)} == {200}
            assert server.get("/health")[1]["counters"]["lost_log_lines"] > 0
        elif all(status_of(server, timeout=3) for _ in range(20)):
            raise Inconclusive("stock answered all")
