"""A log that cannot be written costs no request: six faults, 2,000 requests each, and what stock does at them (the control)."""

from __future__ import annotations

import concurrent.futures
import contextlib
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

from kit.harness import KILLER, Inconclusive, Server, wait_until

REQUESTS = 2000
COMPLETIONS = 40
OFF = {"MLX_SHIM_BLOCKING_LOG": "0"}
SMALL_QUEUE = {"MLX_SHIM_LOG_QUEUE": "64K"}
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

    loses_all = True  # no line can be written

    def __init__(self, folder):
        self.arguments = {}

    def strike(self):
        """Nothing more: it is there from the start."""


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
    """0 where no answer came."""
    try:
        return server.get(path, timeout=timeout)[0]
    except (OSError, http.client.HTTPException):
        return 0


def ask(server, count, threads=4):
    """The statuses of so many GETs."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return set(pool.map(lambda _: status_of(server), range(count)))


@pytest.mark.parametrize("kind", FAULTS)
def test_every_request_is_answered(line, tiny, tmp_path, kind):
    fault = kind(tmp_path)
    with struck(fault, line, tiny, tmp_path, **SMALL_QUEUE) as server:
        server.ready()
        start = time.monotonic()
        assert ask(server, REQUESTS - COMPLETIONS) == {200}
        for n in range(COMPLETIONS):
            assert server.post({"prompt": f"{n}", "max_tokens": 1})[0] == 200
        lost = server.get("/health")[1]["counters"]["lost_log_lines"]
        print(f"{line}, {kind.__name__}: {time.monotonic() - start:.1f} s, {lost} lines lost")
        assert lost >= REQUESTS if fault.loses_all else lost > 0


@pytest.mark.parametrize("kind", FAULTS)
def test_control_stock_answers_nothing(line, tiny, tmp_path, kind):
    fault = kind(tmp_path)
    with struck(fault, line, tiny, tmp_path, **OFF) as server:
        if fault.loses_all:
            statuses = {status_of(server) for _ in range(5)}
        else:
            # Until the pipe is full. Each line is of some sixty bytes.
            blocked = any(status_of(server, timeout=3) == 0 for _ in range(2500))
            statuses = {status_of(server, timeout=3) if blocked else 200}
        if statuses != {0} or not server.alive:
            raise Inconclusive(f"stock answered {statuses}")


def test_a_start_on_a_full_pipe(line, tiny, tmp_path):
    """As for a server that is started again on the pipe of the one before. Stock does not even listen."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 512)
    os.set_blocking(writer, True)
    with (
        Server(line, tiny, tmp_path / "off", stderr=writer, environ=OFF) as stock,
        Server(line, tiny, tmp_path / "on", stderr=writer) as server,
    ):
        server.ready()
        if wait_until(lambda: listens(stock), 5):
            raise Inconclusive("stock listens")
    os.close(reader)
    os.close(writer)


def lines_of(text):
    return [int(n) for n in re.findall(rb"GET /number/(\d+) HTTP", text)]


class Reader:
    """Reads a pipe from now on, until it is closed at its other end."""

    def __init__(self, fd):
        self.fd, self.text = fd, b""
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while select.select([self.fd], [], [], 60)[0]:
            piece = os.read(self.fd, 1 << 16)
            if not piece:
                return
            self.text += piece


def test_a_reader_that_comes_late_finds_all_in_order(line, tiny, tmp_path):
    """All that had room, then how many had not, then what comes after."""
    fault = UnreadPipe(tmp_path)
    with struck(fault, line, tiny, tmp_path, **SMALL_QUEUE) as server:
        server.ready()
        for n in range(REQUESTS):
            assert status_of(server, f"/number/{n}") == 404
        lost = server.get("/health")[1]["counters"]["lost_log_lines"]
        reader = Reader(fault.reader)
        assert wait_until(lambda: b"are lost here" in reader.text, 10)
        assert status_of(server, "/number/9999") == 404
        assert wait_until(lambda: b"/number/9999" in reader.text, 10)
        assert b"mlx-lm-shim: %d lines of the log are lost here: " % (lost + 1) in reader.text
    reader.thread.join()
    numbers = lines_of(reader.text)
    assert numbers[:-1] == list(range(len(numbers) - 1))
    # /health has a line of its own, and is among the lost.
    assert len(numbers) - 1 + lost == REQUESTS


@pytest.mark.usefixtures("killable")
def test_the_last_words_come_last_and_whole(line, tiny, tmp_path):
    """A reader takes all: the traceback, then the verdict."""
    reader_fd, writer = os.pipe()
    with Server(line, tiny, tmp_path / "log", stderr=writer) as server:
        os.close(writer)
        reader = Reader(reader_fd)
        server.ready().send_and_leave(KILLER)
        assert wait_until(lambda: not server.alive, 30), reader.text.decode()
        assert server.wait_exit() == 70
        reader.thread.join()
    said = reader.text.decode().splitlines()
    # Beside them is the access line of a client that was told.
    begin = said.index("Traceback (most recent call last):")
    (verdict,) = [text for text in said[begin:] if text.startswith("mlx-lm-shim: fatal: ")]
    assert verdict.endswith("exit 70")


@pytest.mark.usefixtures("killable")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_death_is_no_later(line, tiny, tmp_path, kind):
    with struck(kind(tmp_path), line, tiny, tmp_path, **SMALL_QUEUE) as server:
        server.ready()
        if kind is UnreadPipe:
            ask(server, 1200)
        server.send_and_leave(KILLER)
        start = time.monotonic()
        assert server.wait_exit(30) == 70
        print(f"{line}, {kind.__name__}: {time.monotonic() - start:.2f} s")
        assert time.monotonic() - start < 5


CHATTY = """
    import logging, sys, threading, warnings
    import mlx_lm.server as server
    from tqdm import tqdm
    logging.getLogger().addHandler(logging.StreamHandler())  # holds sys.stderr, long before the server starts
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


@pytest.mark.parametrize("environ", [{}, OFF], ids=["guarded", "stock"])
def test_logging_warnings_and_progress_bars(line, tiny, tmp_path, environ):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(CHATTY))
    fault = UnreadPipe(tmp_path)
    fault.arguments["entry"] = (str(path),)
    with struck(fault, line, tiny, tmp_path, **SMALL_QUEUE, **environ) as server:
        if not environ:
            server.ready()
        if environ:
            if all(status_of(server, timeout=5) for _ in range(20)):
                raise Inconclusive("stock answered all")
        else:
            assert {status_of(server) for _ in range(20)} == {200}
            assert server.get("/health")[1]["counters"]["lost_log_lines"] > 0
