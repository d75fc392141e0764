"""The queue of the log, its thread and its streams, under hostile readers, handlers and forks."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from pathlib import Path

import pytest

from kit.harness import NEWEST, REPO, clean_environ, python_of, wait_until
from shim.core import report
from shim.guards import blocking_log
from shim.guards.blocking_log.stream import LogBuffer
from shim.guards.blocking_log.writer import Writer

LIMIT = 64 << 10


class Log:
    """A writer at the end of a pipe, and what it has lost."""

    def __init__(self, limit=LIMIT):
        self.reader, self.fd = os.pipe()
        self.lost = 0
        self.writer = Writer(self.fd, limit, self.note)
        self.writer.start()

    def note(self, lines):
        self.lost += lines

    def read(self, seconds=5.0):
        """All that comes until nothing has come for a while."""
        found = b""
        while select.select([self.reader], [], [], seconds)[0]:
            piece = os.read(self.reader, 1 << 20)
            if not piece:
                break
            found, seconds = found + piece, 0.3
        return found

    def fill(self):
        """The pipe is full, and the thread waits for a reader."""
        os.set_blocking(self.fd, False)
        filled = 0
        try:
            while True:
                filled += os.write(self.fd, b"#" * 4095 + b"\n")
        except BlockingIOError:
            os.set_blocking(self.fd, True)
        return filled


@pytest.fixture
def log():
    return Log()


def stream_over(writer, old=None, **how):
    return io.TextIOWrapper(LogBuffer(writer, old), "utf-8", "backslashreplace", "\n", **how)


def numbers(text):
    return [int(n) for n in re.findall(rb"line (\d+)\n", text)]


def test_lines_are_written_in_order(log):
    for n in range(1000):
        log.writer.put(b"line %d\n" % n)
    assert log.writer.flush(5)
    assert numbers(log.read()) == list(range(1000))
    assert log.lost == 0


def test_no_caller_waits_for_a_reader(log):
    log.fill()
    start = time.monotonic()
    for n in range(20_000):
        log.writer.put(b"line %d\n" % n)
    assert not log.writer.flush(0.1)
    assert time.monotonic() - start < 5
    assert log.lost > 0
    kept = numbers(log.read())
    assert kept == list(range(len(kept)))
    assert len(kept) + log.lost == 20_000


def test_a_reader_that_comes_back_is_told_how_many_are_lost(log):
    log.fill()
    for n in range(20_000):
        log.writer.put(b"line %d\n" % n)
    text = log.read()
    assert b"mlx-lm-shim: %d lines of the log are lost here: " % log.lost in text
    log.writer.put(b"line 20000\n")
    assert log.read() == b"line 20000\n"


def test_the_number_stands_where_the_lines_are_missing(log):
    log.fill()
    for n in range(10_000):
        log.writer.put(b"line %d\n" % n)
    lost = log.lost
    os.read(log.reader, 1 << 20)
    assert wait_until(lambda: len(log.writer._waiting) < LIMIT // 2, 5)
    log.writer.put(b"line 10000\n")
    text = log.read()
    notice = text.index(b"%d lines of the log are lost here" % lost)
    assert text.index(b"line %d\n" % (10_000 - lost - 1)) < notice < text.index(b"line 10000\n")


def test_a_reader_of_one_byte_a_second(log):
    log.fill()
    for n in range(20_000):
        log.writer.put(b"line %d\n" % n)
    begin, lost = log.writer._out, log.lost
    for _ in range(5):
        os.read(log.reader, 1)
        time.sleep(0.01)
        start = time.monotonic()
        log.writer.put(b"late\n")
        assert time.monotonic() - start < 0.1
    assert log.writer._out - begin <= 4096
    assert log.lost == lost + 5


def test_a_reader_that_is_gone(log):
    os.close(log.reader)
    for n in range(100):
        log.writer.put(b"line %d\n" % n)
    assert log.writer.flush(5), "nothing is waited for: it cannot be written"
    assert log.lost == 100


def test_a_named_pipe_gets_another_reader(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lost = []
    writer = Writer(os.open(path, os.O_WRONLY), LIMIT, lost.append)
    writer.start()
    os.close(reader)
    writer.put(b"one\ntwo\n")
    assert writer.flush(5)
    assert sum(lost) == 2
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer.put(b"three\n")
    assert writer.flush(5)
    assert (
        os.read(reader, 1000)
        == b"mlx-lm-shim: 2 lines of the log are lost here: Broken pipe\nthree\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk():
    lost = []
    writer = Writer(os.open("/dev/full", os.O_WRONLY), LIMIT, lost.append)
    writer.start()
    for _ in range(2000):
        writer.put(b"a line\n")
    assert writer.flush(5)
    assert sum(lost) == 2000


def test_a_file_that_another_process_made_non_blocking(log):
    log.fill()
    os.set_blocking(log.fd, False)
    log.writer.put(b"line 1\n")
    assert not log.writer.flush(0.2)
    assert numbers(log.read()) == [1]
    assert log.lost == 0


def test_no_descriptor():
    lost = []
    writer = Writer(None, LIMIT, lost.append)
    writer.start()
    stream = stream_over(writer, line_buffering=True)
    print("one\ntwo", file=stream)
    assert (sum(lost), stream.isatty(), writer.flush(1)) == (2, False, True)
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()


@pytest.mark.parametrize("size", [100_000, 10 << 20])
def test_a_huge_line_is_cut_and_the_queue_stays_small(log, size):
    log.writer.put(b"x" * size + b"\n")
    log.writer.put(b"line 1\n")
    text = log.read()
    cut = size + 1 - LIMIT // 2
    assert text.startswith(b"x" * (LIMIT // 2) + b" ... %d bytes are cut off here\n" % cut)
    assert numbers(text) == [1]
    assert log.lost == 1


def test_a_long_line_that_finds_room_is_whole():
    log = Log(limit=1 << 20)
    log.writer.put(b"x" * 500_000 + b"\n")
    text = b""
    while len(text) < 500_001:
        text += log.read()
    assert (text, log.lost) == (b"x" * 500_000 + b"\n", 0)


def test_pieces_of_a_line_are_lost_together(log):
    """As PYTHONUNBUFFERED=1 has them written: one print is many writes."""
    log.fill()
    log.writer.put(b"y" * (LIMIT - 100) + b"\n")
    assert wait_until(lambda: log.writer._wake.locked() is True or log.writer._waiting, 5)
    stream = stream_over(log.writer, write_through=True)
    print("a" * 60, "b" * 60, "c", file=stream)
    print("d", file=stream)
    text = log.read()
    assert log.lost == 2
    assert b"b" not in text.replace(b"mlx-lm-shim", b"").split(b"y\n")[-1].split(b"\n")[0]
    assert b"a" * 60 + b" \nmlx-lm-shim: 2 lines of the log are lost here" in text


def test_what_is_not_utf_8(log):
    stream = stream_over(log.writer, line_buffering=True)
    stream.write("\udc80 é\n")
    stream.buffer.write(b"\xff\x00\n")
    assert log.read() == b"\\udc80 \xc3\xa9\n\xff\x00\n"


def test_the_stream_is_a_text_stream(log):
    old = os.fdopen(os.dup(log.fd), "wb")
    stream = stream_over(log.writer, old, line_buffering=True)
    assert stream.write("four\n") == 5
    assert stream.buffer.write(memoryview(b"five\n")) == 5
    assert (stream.fileno(), stream.isatty(), stream.encoding, stream.errors, stream.closed) == (
        old.fileno(), False, "utf-8", "backslashreplace", False,
    )  # fmt: skip
    assert (stream.writable(), stream.readable(), stream.seekable()) == (True, False, False)
    stream.write("held back")
    assert log.read() == b"four\nfive\n"
    stream.flush()
    assert log.read() == b"held back"
    for wrong in (5, "text", None):
        with pytest.raises(TypeError):
            stream.buffer.write(wrong)
    log.writer.flush(5)
    subprocess.run(["sh", "-c", "echo from a child >&2"], stderr=stream, check=True)
    assert log.read() == b"from a child\n"


def test_a_stream_that_is_closed_takes_lines_and_loses_them(log):
    stream = stream_over(log.writer, os.fdopen(os.dup(log.fd), "wb"), line_buffering=True)
    stream.close()
    print("one", file=stream)
    with pytest.raises(ValueError, match="closed"):
        stream.fileno()
    assert log.lost == 1


def test_many_threads(log):
    got = []
    reading = threading.Thread(target=lambda: got.append(log.read()))
    reading.start()
    stream = stream_over(log.writer, line_buffering=True)
    threads = [
        threading.Thread(
            target=lambda n=n: [print(f"{n} {i} end", file=stream) for i in range(500)]
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading.join()
    lines = [line.split() for line in got[0].decode().splitlines()]
    assert all(len(line) == 3 for line in lines if "lost" not in line)
    for n in range(8):
        mine = [int(line[1]) for line in lines if line[0] == str(n)]
        assert mine == sorted(mine)
    assert sum(len(line) == 3 for line in lines) + log.lost == 4000


def test_a_line_from_a_handler_of_a_signal_in_the_midst_of_a_line(log):
    """Thousands of signals hit a thread that does nothing but put."""
    os.close(log.reader)
    hits = []
    handler = lambda *_: (hits.append(1), log.writer.put(b"from a handler\n"))  # noqa: E731
    former = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        deadline, puts = time.monotonic() + 1, 0
        while time.monotonic() < deadline:
            log.writer.put(b"line\n")
            puts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert log.writer.flush(5)
    assert len(hits) > 100
    # A line that tells of lost ones may be lost itself.
    assert puts + len(hits) <= log.lost <= (puts + len(hits)) * 1.01


def test_a_line_from_del_and_from_a_weak_reference(log):
    stream = stream_over(log.writer, line_buffering=True)

    class Loud:
        def __del__(self):
            print("from del", file=stream)

    class Node:
        pass

    former = gc.get_threshold()
    gc.set_threshold(1)
    try:
        held = []
        for n in range(200):
            loud, node = Loud(), Node()
            loud.me, node.me = loud, node
            held.append(weakref.ref(node, lambda _: print("from a reference", file=stream)))
            del loud, node
            print(f"line {n}", file=stream)
        gc.collect()
    finally:
        gc.set_threshold(*former)
    text = log.read()
    assert (text.count(b"from del\n"), text.count(b"from a reference\n")) == (200, 200)
    assert numbers(text) == list(range(200))


def test_a_child_of_a_fork_writes_itself_and_not_twice(log):
    log.fill()
    log.writer.put(b"of the parent\n")
    stream = stream_over(log.writer, line_buffering=True)
    child = os.fork()
    if not child:
        try:
            log.writer.forget()
            reader, fd = os.pipe()
            os.dup2(fd, log.fd)
            print("of the child", file=stream)
            os._exit(0 if os.read(reader, 100) == b"of the child\n" else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert log.read().count(b"of the parent\n") == 1


def test_a_flush_waits_for_what_was_put_before_it_and_no_longer(log):
    """Others go on to write without end."""
    over = threading.Event()

    def flood():
        while not over.is_set():
            log.writer.put(b"flood\n")

    def drain():
        while not over.is_set():
            log.read(0.1)

    threads = [threading.Thread(target=target) for target in (flood, drain)]
    for thread in threads:
        thread.start()
    try:
        assert log.writer.flush(10)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_after_the_end_lines_are_written_by_their_callers(log):
    log.writer.put(b"before\n")
    log.writer.end(time.monotonic() + 5)
    log.writer.put(b"after\n")
    assert log.read() == b"before\nafter\n"
    log.fill()
    log.writer._ends_at = time.monotonic() + 0.1
    start = time.monotonic()
    log.writer.put(b"too late\n")
    assert time.monotonic() - start < 1
    assert log.lost == 1


def test_what_goes_wrong_in_put_costs_the_line_alone(log, monkeypatch):
    monkeypatch.setattr(log.writer, "_waiting", None)
    log.writer.put(b"a line\n")
    assert log.lost == 1


def test_the_thread_goes_on_after_what_goes_wrong_in_it(log, monkeypatch):
    write, failures = os.write, []

    def failing(fd, data):
        if fd == log.fd and not failures:
            failures.append(data)
            raise BlockingIOError
        return write(fd, data)

    def closed(*_):
        raise OSError("the descriptor is closed")

    monkeypatch.setattr(os, "write", failing)
    monkeypatch.setattr(blocking_log.writer, "select", types.SimpleNamespace(select=closed))
    log.writer.put(b"line 1\n")
    assert log.writer.flush(5)
    assert numbers(log.read()) == [1]


# In a process of its own: what becomes of the streams of a server, and of those of others.
PRELUDE = """
    import io, logging, os, sys
    captured = sys.stderr
    buffer = sys.stderr.buffer if sys.stderr else None
    from shim.core import report
    from shim.engine.state import engine
    from shim.guards import blocking_log
    from shim.guards.blocking_log.stream import LogBuffer
    lost = lambda: engine.counters["lost_log_lines"]
"""


def run(code, redirection="2>&1 | cat", status=0):
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    command = f'"$0" -c "$1" {redirection}'
    child = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command, python_of(NEWEST), program],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environ(PYTHONPATH=str(REPO), PYTHONUNBUFFERED=None),
        timeout=60,
    )
    assert child.returncode == status, child.stdout + child.stderr
    return child.stdout


def test_the_stream_stays_the_same_object():
    said = run("""
        kind, shown = type(sys.stderr), repr(sys.stderr)
        blocking_log.start()
        blocking_log.start()
        assert sys.stderr is captured is sys.__stderr__ and type(sys.stderr) is kind
        assert repr(sys.stderr) == shown and isinstance(captured.buffer, LogBuffer)
        assert sys.stderr.fileno() == 2
        assert sys.stderr.line_buffering and not sys.stderr.write_through
        assert report.log is captured.buffer.writer
        assert not isinstance(sys.stdout.buffer, LogBuffer)
        print("to the old one", file=captured)
        report.line("from the shim")
        print("done", file=sys.stderr)
    """)
    assert said == "to the old one\nmlx-lm-shim: from the shim\ndone\n"


def test_stdout_where_logging_writes_to_it_and_one_order_for_both():
    said = run("""
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        blocking_log.start()
        assert sys.stdout.buffer.writer is sys.stderr.buffer.writer
        for n in range(100):
            logging.warning(f"{n} out")
            print(f"{n} err", file=sys.stderr)
    """)
    assert said.split("\n")[:-1] == [f"{n} {name}" for n in range(100) for name in ("out", "err")]


def test_no_stderr_at_all():
    said = run(
        """
        assert sys.stderr is None
        logging.basicConfig()
        blocking_log.start()
        logging.warning("lost")
        print("lost", file=sys.stderr)
        assert report.log is None and lost() == 2
        print("OK")
    """,
        "2>&-",
    )
    assert said == "OK\n"


@pytest.mark.parametrize("how", ["sys.stderr.close()", "sys.stderr.detach()"])
def test_a_stderr_that_the_program_has_closed(how):
    said = run(f"""
        handler = logging.StreamHandler()
        logging.getLogger().addHandler(handler)
        {how}
        blocking_log.start()
        print("lost", file=sys.stderr)
        logging.warning("lost")
        assert lost() == 2
        print("OK", flush=True)
        os._exit(0)
    """)
    assert said.endswith("OK\n")


def test_an_object_of_the_program_is_left_alone_and_what_it_ends_in_is_covered():
    said = run("""
        class Tee:
            def write(self, text):
                return captured.write(text.upper())
            def flush(self):
                captured.flush()
        sys.stderr = tee = Tee()
        blocking_log.start()
        assert sys.stderr is tee and isinstance(captured.buffer, LogBuffer)
        print("said", file=sys.stderr)
    """)
    assert said == (
        "mlx-lm-shim: blocking_log: sys.stderr is an object of the program, which writes its lines "
        "itself\nSAID\n"
    )


@pytest.mark.parametrize("what", ["open({!r}, 'w')", "io.TextIOWrapper(io.BytesIO())"])
def test_a_file_of_the_program_is_left_alone(tmp_path, what):
    run(f"""
        sys.stderr = {what.format(str(tmp_path / "log"))}
        blocking_log.start()
        assert not isinstance(sys.stderr.buffer, LogBuffer)
        assert isinstance(captured.buffer, LogBuffer) and report.states == {{}}
        sys.stderr.write("x")
    """)
    assert "open" not in what or (tmp_path / "log").read_text() == "x"


def test_what_waits_is_written_as_the_interpreter_ends():
    said = run("""
        class Late:
            def __del__(self):
                print("from the teardown", file=captured)
        blocking_log.start()
        late = Late()
        for n in range(2000):
            print(n, file=sys.stderr)
        1 / 0
    """, status=1)  # fmt: skip
    lines = said.splitlines()
    assert lines[:2000] == [str(n) for n in range(2000)]
    assert lines[-1] == "from the teardown"
    assert "ZeroDivisionError: division by zero" in lines


def test_the_interpreter_ends_where_nobody_reads():
    start = time.monotonic()
    run("""
        os.dup2(os.pipe()[1], 2)
        blocking_log.start()
        for n in range(100_000):
            print(n, file=sys.stderr)
        assert lost() == 0
        print("OK")
    """)
    assert time.monotonic() - start < 30


def test_a_fork_of_a_server_and_a_server_in_a_fork():
    said = run("""
        blocking_log.start()
        print("parent", file=sys.stderr)
        report.flush(5)
        if not os.fork():
            assert report.log is None
            print("child", file=sys.stderr)
            report.line("child")
            blocking_log.start()
            assert report.log is captured.buffer.writer and report.log.at_work
            print("a server", file=sys.stderr)
            sys.exit()
        os.wait()
        print("parent", file=sys.stderr)
    """)
    assert said == "parent\nchild\nmlx-lm-shim: child\na server\nparent\n"


STUCK = """
    import threading, time
    from shim.engine import fatal
    forever = lambda *_: threading.Event().wait()
    class Stuck:
        put = flush = forever
"""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("report.log = Stuck()", id="the log itself"),
        # As of a pipe that another thread fills after select() said that there is room.
        pytest.param("show = report.line_at_end = forever", id="the last line"),
        pytest.param("report._write_here = forever", id="all writes"),
    ],
)
def test_the_exit_is_certain_whatever_the_log_does(fault):
    start = time.monotonic()
    run(
        textwrap.dedent(STUCK)
        + textwrap.dedent(f"""
            show = None
            {fault}
            fatal.prepare()
            fatal.die(70, "a test", show)
        """),
        status=70,
    )
    assert time.monotonic() - start < 10


def test_the_verdict_finds_its_way_past_a_log_that_is_stuck():
    """Once, though two threads try."""
    said = run(
        textwrap.dedent(STUCK)
        + textwrap.dedent("""
            class Full:
                put = lambda self, data: None
                flush = lambda self, seconds: time.sleep(max(0, seconds))
            report.log = Full()
            fatal.prepare()
            fatal.die(70, "a test")
        """),
        status=70,
    )
    assert said.count("fatal: a test; 0 in flight") == 1


def test_the_verdict_is_written_though_stdout_is_closed():
    said = run(
        """
        from shim.engine import fatal
        blocking_log.start()
        sys.stdout.close()
        fatal.die(70, "a test")
        """,
        status=70,
    )
    assert said.count("fatal: a test; 0 in flight") == 1


def test_sigpipe_ends_no_server():
    """A program may have its default back."""
    run("""
        import signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(reader)
        blocking_log.start()
        print("lost", file=sys.stderr)
        assert report.flush(5) and lost() == 1
    """)


def test_no_thread_can_be_started():
    said = run("""
        import threading
        def start(self):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = start
        blocking_log.start()
        assert not isinstance(sys.stderr.buffer, LogBuffer)
        print("as stock", file=sys.stderr)
    """)
    assert said.startswith("mlx-lm-shim: blocking_log failed: can't start new thread\n")
    assert said.endswith("as stock\n")


def test_the_shim_speaks_through_the_log(monkeypatch):
    said = []
    log = types.SimpleNamespace(put=said.append, flush=lambda seconds: seconds == 7)
    monkeypatch.setattr(report, "log", log)
    monkeypatch.setattr(report, "stderr_fd", lambda: 2)
    report.line("one")
    report.line_nowait("two")
    assert said == [b"mlx-lm-shim: one\n", b"mlx-lm-shim: two\n"]
    assert report.flush(7)
    assert not report.flush(6)


def test_handlers_are_found_wherever_they_are():
    handler = logging.StreamHandler(sys.stdout)
    logger = logging.getLogger("somewhere.deep")
    logger.addHandler(handler)
    try:
        assert handler in blocking_log._handlers()
    finally:
        logger.removeHandler(handler)
