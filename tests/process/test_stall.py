"""No request hangs: models that raise, block, hold the GIL, or deliver to all but one.

And the answers that clients get.
"""

from __future__ import annotations

import json
import signal
import stat
import textwrap
import time

import pytest

from conftest import FaultyModel
from kit.harness import Inconclusive, Server, expect_zombie, wait_until
from kit.streams import Stream, error_of

# Long enough to tell every client. The process ends as soon as that is done.
PATIENT = {"MLX_SHIM_EXIT_GRACE": "10s"}
SHORT = {"MLX_SHIM_DECODE_STALL": "4s", "MLX_SHIM_PREFILL_STALL": "6s", **PATIENT}


def fatal_line(server):
    (said,) = [x for x in server.shim_lines() if "fatal:" in x]
    return said


@pytest.mark.guard("generation_death")
def test_a_death_with_streams_open_and_requests_queued(line, faulty, tmp_path):
    model = faulty(kind="RuntimeError", delay=0.03)
    environ = {"MLX_SHIM_REPORT_DIR": str(tmp_path / "reports"), **PATIENT}
    args = (*model.args, "--decode-concurrency", "4", "--prompt-concurrency", "1")
    with Server(line, model.path, tmp_path / "log", args=args, environ=environ) as server:
        before = requests(server.ready())
        started = [Stream(server, {"prompt": f"secret {n}", "max_tokens": 2000}) for n in range(4)]
        for stream in started:
            assert stream.first.wait(30)
        queued = [Stream(server, {"prompt": f"secret {n}", "max_tokens": 2000}) for n in range(3)]
        assert wait_until(lambda: requests(server) == before + 7, 30)
        model.fire()
        fired = time.monotonic()
        assert server.wait_exit(30) == 70
        print(
            f"{line}: {time.monotonic() - fired:.2f} s from the fault to the exit, "
            "seven clients told"
        )
    for stream in started:
        stream.join()
        assert stream.status == 200
        assert not stream.done, "a cut answer must not look complete"
        assert error_of(stream)["code"] == "engine_dead"
    for stream in queued:
        stream.join()
        assert stream.status == 503
        assert stream.headers["Retry-After"] == "10"
        assert error_of(stream)["type"] == "server_error"
    assert "7 in flight" in fatal_line(server)
    check_report(tmp_path / "reports", "secret")


def requests(server):
    return server.get("/health")[1]["counters"]["requests"]


def check_report(folder, secret):
    (report,) = folder.iterdir()
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    text = report.read_text()
    assert secret not in text, "never a prompt"
    content = json.loads(text)
    assert content["exit"] == 70
    assert content["exception"] == "RuntimeError: the model's forward failed"
    assert any("in misbehave" in frame for frame in content["traceback"])
    assert content["in_flight"] == 7
    assert sorted(r["phase"] for r in content["requests"]).count("decode") == 4
    assert all(r["tokens"] > 0 for r in content["requests"] if r["phase"] == "decode")
    assert all(
        r["prompt"] >= len("secret 0") for r in content["requests"] if r["phase"] == "decode"
    )
    assert content["guards"]["stall"] == "active"
    assert content["memory"]["peak_resident"] > 10**7
    assert any(
        "misbehave" in frame or "generation_death" in frame
        for frames in content["threads"].values()
        for frame in frames
    )


@pytest.mark.control("generation_death")
def test_control_stock_cuts_streams_without_a_word_or_hangs(line, faulty, tmp_path):
    model = faulty(kind="RuntimeError", delay=0.03)
    with Server(
        line, model.path, tmp_path / "log", args=model.args, environ={"MLX_SHIM": "0"}
    ) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 2000})
        assert stream.first.wait(30)
        model.fire()
        stream.thread.join(8)
        said = any("error" in e for e in stream.events)
        if said or not server.alive:
            raise Inconclusive(f"stock told its client: {stream.lines[-2:]}")


@pytest.mark.guard("stall")
@pytest.mark.control("stall")
def test_a_forward_that_sleeps_for_ever_is_a_stall(line, tmp_path):
    """Blocked in native code at 0 % CPU.

    The control, without the guard, stays blocked for longer.
    """
    model, other = (FaultyModel(tmp_path / name, kind="sleep") for name in ("faulty", "other"))
    off = SHORT | {"MLX_SHIM_STALL": "0"}
    with (
        Server(line, other.path, tmp_path / "off", args=other.args, environ=off) as control,
        Server(line, model.path, tmp_path / "log", args=model.args, environ=SHORT) as server,
    ):
        control.ready()
        other.fire()
        control.send_and_leave({"prompt": "x"})
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 50_000})
        assert stream.first.wait(30)
        model.fire()
        fired = time.monotonic()
        assert server.wait_exit(60) == 70
        print(
            f"{line}: {time.monotonic() - fired:.1f} s from the block to the exit, "
            "with a limit of 4 s"
        )
        assert error_of(stream.join())["code"] == "engine_stalled"
        assert "stalled: request" in fatal_line(server)
        assert "(decode, " in fatal_line(server)
        assert "misbehave" in fatal_line(server), "the verdict names the frame at fault"
        assert "in misbehave\n" in server.text(), "and so does the dump of all stacks"
        assert "Thread 0x" in server.text()
        expect_zombie(control)


@pytest.mark.guard("stall")
def test_a_prefill_that_never_ends_is_a_stall(line, faulty, tmp_path):
    model = faulty(kind="sleep")
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=SHORT) as server:
        server.ready()
        model.fire()
        first = Stream(server, {"prompt": "x" * 50, "max_tokens": 5})
        time.sleep(1)
        # It waits for the batch to end.
        second = Stream(server, {"prompt": "y", "seed": 1, "max_tokens": 5})
        assert server.wait_exit(60) == 70
        for stream in (first, second):
            assert stream.join().status == 503, "no byte of a body has gone out: the status tells"
            assert error_of(stream)["code"] == "engine_stalled"


@pytest.mark.guard("stall")
def test_a_wedged_engine_is_found_though_clients_give_up_sooner(line, faulty, tmp_path):
    model = faulty(kind="sleep")
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=SHORT) as server:
        server.ready()
        model.fire()
        started = time.monotonic()
        while server.alive and time.monotonic() - started < 40:
            try:
                server.post({"prompt": "x", "max_tokens": 5}, timeout=1.5)
            except OSError:
                pass
        assert server.wait_exit(5) == 70
        assert "stalled: request" in fatal_line(server)


@pytest.mark.guard("endless_wait")
def test_sigint_leaves_nobody_without_a_word(line, faulty, tmp_path):
    model = faulty(kind="none", delay=0.05)
    # Stock's own orderly stop, as a program may ask for.
    environ = {"MLX_SHIM_ABRUPT_STOP": "0", **PATIENT}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert stream.first.wait(30)
        server.process.send_signal(signal.SIGINT)
        assert error_of(stream.join())["code"] == "shutting_down"
        assert not stream.done
        assert server.wait_exit(30) in (0, -signal.SIGABRT)


def test_a_report_does_not_quote_a_request(line, tiny, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import mlx_lm.server as server
        def fail(self, tokenizer, *args, **kwargs):
            raise SystemExit("cannot handle " + repr("my sec" + "ret prompt"))
        server.ResponseGenerator._make_state_machine = fail
        server.main()
    """)
    )
    environ = {"MLX_SHIM_REPORT_DIR": str(tmp_path / "reports")}
    with Server(line, tiny, tmp_path / "log", entry=(str(program),), environ=environ) as server:
        assert wait_until(lambda: server.log.exists() and "Starting httpd" in server.text(), 60)
        server.send_and_leave({"prompt": "my secret prompt"})
        assert server.wait_exit(30) == 70
        (report,) = (tmp_path / "reports").iterdir()
        assert "secret" not in report.read_text()
        assert json.loads(report.read_text())["exception"].startswith("SystemExit: [withheld")


@pytest.mark.guard("stall", "untruthful_health")
def test_dump_reports_once_an_episode_and_lives(line, faulty, tmp_path):
    model = faulty(kind="sleep_while_triggered")
    environ = SHORT | {"MLX_SHIM_ON_STALL": "dump"}
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=environ) as server:
        stream = Stream(server.ready(), {"prompt": "x", "max_tokens": 100_000})
        assert stream.first.wait(30)
        for episode in (1, 2):
            model.fire()
            assert wait_until(lambda: server.get("/health")[1]["status"] == "stalled", 30)
            time.sleep(2)
            assert sum("stalled: request" in x for x in server.shim_lines()) == episode
            assert (
                server.get("/health")[0]
                == server.get("/health/live")[0]
                == server.get("/health/ready")[0]
                == 503
            )
            assert server.get("/v1/models")[0] == 503
            model.trigger.unlink()
            assert wait_until(lambda: server.get("/health")[1]["status"] == "ok", 30)
            stream = Stream(server, {"prompt": "x", "max_tokens": 100_000})
            stream.first.wait(30)
        assert server.alive


LIVELOCK = """
    import mlx_lm.server as server
    stock = server.BatchGenerator.next
    dropped = []
    steps = 0
    # One request that has had some tokens gets no more. All others are served.
    def next(self):
        global steps
        prompts, tokens = stock(self)
        steps += bool(tokens)
        if steps == 30:
            dropped.append(tokens[0].uid)
        return prompts, [t for t in tokens if t.uid not in dropped]
    server.BatchGenerator.next = next
    server.main()
"""


@pytest.mark.guard("stall")
@pytest.mark.control("stall")
@pytest.mark.parametrize("guarded", [True, False])
def test_a_livelock_that_starves_one_request(line, faulty, tmp_path, guarded):
    """The loop steps, others report progress and get their tokens, and one request gets nothing."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(LIVELOCK))
    model = faulty(kind="none", delay=0.02)
    environ = SHORT if guarded else SHORT | {"MLX_SHIM_STALL": "0"}
    with Server(
        line, model.path, tmp_path / "log", args=model.args, entry=(str(program),), environ=environ
    ) as server:
        server.ready()
        victim = Stream(server, {"prompt": "victim", "max_tokens": 100_000})
        assert victim.first.wait(30)
        others = [Stream(server, {"prompt": "y" * 300, "max_tokens": 100}) for _ in range(4)]
        started = time.monotonic()
        while server.alive and time.monotonic() - started < 15:
            others = [
                o
                if o.thread.is_alive()
                else Stream(server, {"prompt": "y" * 300, "max_tokens": 100})
                for o in others
            ]
            time.sleep(0.05)
        if guarded:
            assert server.wait_exit(30) == 70
            assert "no token for" in fatal_line(server)
            assert "deliveries went to others" in fatal_line(server)
            assert error_of(victim.join())["code"] == "engine_stalled"
        elif not server.alive or not victim.thread.is_alive():
            raise Inconclusive("the livelock did not last without the guard")
