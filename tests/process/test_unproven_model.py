"""A command line with which no request can succeed: the server says so and ends, before `ok`."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest

from kit.harness import LINES, NEWEST, Inconclusive, Server, wait_until
from kit.models import hybrid_model
from kit.streams import Stream
from shim.cli import tiny_model

OLDEST = LINES[0]
ON, OFF = {"MLX_SHIM_SELF_CHECK": "1"}, {"MLX_SHIM_SELF_CHECK": "0"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
WINDOW = 64
LONG = "y" * 3 * WINDOW


class Fault:
    """Arguments that cannot work, what the last line says of them, and requests that show it.

    What both lines have in common is shown on one of them.
    """

    def __init__(self, line, args, says, asks=(CHAT,), model="tiny"):
        self.line, self.args, self.says, self.asks, self.model = line, args, says, asks, model


QUANTIZED = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start")
NO_BITS = ("--kv-bits", "7", "--kv-group-size", "32", "--quantized-kv-start", "0")
NOT_QUANTIZED = r"--kv-bits 8 .*NotImplementedError: RotatingKVCache"
DRAFT = ("--draft-model", "{model}")
FAULTS = {
    "temperature": Fault(OLDEST, ("--temp", "-1"), r"--temp: temperature must be at least 0"),
    "top_p": Fault(NEWEST, ("--top-p", "7"), r"--top-p: top_p must be at most 1"),
    "template": Fault(
        NEWEST, ("--chat-template", "{{ nope"), r"--chat-template: .*TemplateSyntaxError"
    ),
    "draft beside hybrid": Fault(
        OLDEST, DRAFT, r"--draft-model .*requires a trimmable prompt cache", model="hybrid"
    ),
    "draft beside window": Fault(
        NEWEST, DRAFT, rf"--draft-model .*from {WINDOW} tokens on RotatingKVCache", (), "window"
    ),
    "bits beside window": Fault(NEWEST, (*QUANTIZED, "0"), NOT_QUANTIZED, model="window"),
    "bits beside window later": Fault(
        NEWEST, (*QUANTIZED, "150"), NOT_QUANTIZED, ({"prompt": LONG, "max_tokens": 4},), "window"
    ),
    "bits that do not exist": Fault(NEWEST, NO_BITS, r"--kv-bits 7 --kv-group-size 32: .*quantiz"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def get(line, kind):
        if (line, kind) not in made:
            at = folder / f"{kind}-{line}"
            # Heads of 32, the smallest group that can be quantized.
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
            slides = {"layer_types": ["sliding_attention", "full_attention"]}
            made[line, kind] = {
                "other": lambda: tiny_model.make(at),
                "tiny": lambda: tiny_model.make(at, **heads),
                "window": lambda: tiny_model.make(at, **heads, **slides, sliding_window=WINDOW),
                "hybrid": lambda: hybrid_model.make(line, at, "qwen3_next"),
            }[kind]()
        return made[line, kind]

    return get


def health(server, path="/health"):
    try:
        return server.get(path)[1]["status"]
    except OSError:
        return None


def says_ok(server):
    assert wait_until(lambda: health(server) == "ok", 60), server.text()[-3000:]
    return server


@pytest.mark.guard("unproven_model")
@pytest.mark.parametrize("name", FAULTS)
def test_it_ends_with_78_and_names_the_option(name, models, tmp_path):
    fault = FAULTS[name]
    line = fault.line
    model = models(line, fault.model)
    args = tuple(part.format(model=model) if "model}" in part else part for part in fault.args)
    with Server(line, model, tmp_path / "log", args=args, environ=ON) as server:
        seen = set()
        while server.alive:
            seen.add(health(server, "/health/ready"))
            time.sleep(0.02)
        assert server.wait_exit() == 78
        assert "ok" not in seen
        last = server.shim_lines()[-1]
        assert re.search(rf"the self-check failed: {fault.says}.*exit 78", last), last


@pytest.mark.control("unproven_model")
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.asks])
def test_control_it_says_ok_and_requests_fail(name, models, tmp_path):
    fault = FAULTS[name]
    line = fault.line
    model = models(line, fault.model)
    args = tuple(part.format(model=model) if "model}" in part else part for part in fault.args)
    with Server(line, model, tmp_path / "log", args=args, environ=OFF) as server:
        says_ok(server)
        for ask in fault.asks:
            path = "/v1/chat/completions" if "messages" in ask else "/v1/completions"
            try:
                status = server.post(ask, path)[0]
            except OSError:
                status = 0
        if status == 200 or health(server) != "ok":
            raise Inconclusive(f"{name}: {status}; {server.text()[-2000:]}")


@pytest.mark.control("unproven_model")
def test_control_wrong_tokens_beside_a_window(models, tmp_path):
    """Stock trims nothing if it cannot, and the guesses that were wrong stay in the cache."""
    line = NEWEST
    told = {}
    for draft in (False, True):
        args = ("--draft-model", str(models(line, "other"))) if draft else ()
        log = tmp_path / f"log{draft}"
        with Server(line, models(line, "window"), log, args=args, environ=OFF) as server:
            ask = {"prompt": LONG, "max_tokens": 24, "temperature": 0}
            told[draft] = says_ok(server).post(ask)[1]["choices"][0]["text"]
    if told[False] == told[True]:
        raise Inconclusive(f"with and without a draft model: {told[True]!r}")


@pytest.mark.guard("unproven_model")
def test_an_adapter_that_is_not_there(line, tiny, tmp_path):
    args = ("--adapter-path", str(tmp_path / "nowhere"))
    with Server(line, tiny, tmp_path / "log", args=args, environ=ON) as server:
        assert server.wait_exit() == 78
        assert "--adapter-path" in server.shim_lines()[-1]
        assert "this folder does not exist" in server.shim_lines()[-1]


@pytest.mark.control("unproven_model")
def test_control_0_31_3_ignores_an_adapter_that_is_not_there(tiny, tmp_path):
    args = ("--adapter-path", str(tmp_path / "nowhere"))
    with Server("0.31.3", tiny, tmp_path / "log", args=args, environ=OFF) as server:
        says_ok(server.ready())


def test_a_template_of_the_model_that_does_not_parse(tmp_path):
    model = tiny_model.make(tmp_path / "model")
    change_template(model, "{{ nope")
    with Server(NEWEST, model, tmp_path / "log", environ=ON) as server:
        assert server.wait_exit() == 78
        assert re.search(r"its chat template: .*TemplateSyntaxError", server.shim_lines()[-1])


def test_a_model_that_is_not_for_chats_is_served(tmp_path):
    """Its template wants more than a plain chat: texts are answered, and so may be other chats."""
    model = tiny_model.make(tmp_path / "model")
    change_template(model, "{{ raise_exception('a language is missing') }}")
    with Server(OLDEST, model, tmp_path / "log", environ=ON) as server:
        says_ok(server.ready())
        assert any(
            "a short chat fails, and a plain text is answered" in x for x in server.shim_lines()
        )


def change_template(model, template):
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def test_it_leaves_no_trace(line, tiny, tmp_path):
    with Server(line, tiny, tmp_path / "log", environ=ON | {"MLX_SHIM_DEBUG": "1"}) as server:
        says_ok(server)
        assert any("the self-check took" in x for x in server.shim_lines())
        told = server.get("/health")[1]
        assert set(told["counters"].values()) == {0}
        assert told["in_flight"] == 0
        status, answer = server.post(CHAT, "/v1/chat/completions")
        assert status == 200
        assert answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
        stats = re.findall(r"Prompt Cache: (\d+) sequences", server.text())
        assert set(stats) == {"0"}, "neither its own request nor the client's found an entry"
        assert server.get("/health")[1]["counters"]["requests"] == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_limits_and_keys_are_for_clients(tiny, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    limits = {
        "MLX_SHIM_API_KEY_FILE": str(key),
        "MLX_SHIM_MAX_INFLIGHT": "1",
        "MLX_SHIM_WHILE_LOADING": "reject",
        "MLX_SHIM_MAX_PROMPT_TOKENS": "3",
        "MLX_SHIM_MAX_TOKENS": "1",
        "MLX_SHIM_RECYCLE_REQUESTS": "1",
        "MLX_SHIM_MEMORY_SOFT": "100M",
    }
    with Server(NEWEST, tiny, tmp_path / "log", environ=ON | limits) as server:
        says_ok(server)
        # Five looks of the watchdog.
        time.sleep(1)
        assert server.alive
        assert any("proves nothing" in x for x in server.shim_lines()), "the prompt is too long"


def test_clients_wait_until_it_is_done(faulty, tmp_path):
    model = faulty(kind="sleep_while_triggered")
    model.fire()
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, environ=ON) as server:
        assert wait_until(lambda: health(server) == "loading", 60)
        stream = Stream(server, {"prompt": "x", "max_tokens": 2})
        assert wait_until(lambda: "POST /v1/chat" in server.text(), 60), "its headers are made"
        assert health(server) == "loading"
        assert server.get("/health/ready")[0] == 503
        assert server.get("/health")[1]["in_flight"] == 1, "the client's alone"
        model.trigger.unlink()
        says_ok(server)
        assert stream.join().done


def test_asked_to_stop_meanwhile(faulty, tmp_path):
    model = faulty(kind="none", delay=60)
    with Server(OLDEST, model.path, tmp_path / "log", args=model.args, environ=ON) as server:
        assert wait_until(lambda: "POST /v1/chat" in server.text(), 60)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(30) == 0


@pytest.mark.guard("unproven_model")
def test_a_death_in_it_is_a_failed_start(line, faulty, tmp_path):
    model = faulty(kind="RuntimeError")
    model.fire()
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=ON) as server:
        assert server.wait_exit() == 78
        last = server.shim_lines()[-1]
        assert re.search("the self-check failed: --model .*the model's forward failed", last), last


@pytest.mark.guard("unproven_model")
@pytest.mark.parametrize(("line", "stall"), [(OLDEST, "0"), (NEWEST, "1")])
def test_a_stall_in_it_is_a_failed_start(line, stall, faulty, tmp_path):
    model = faulty(kind="sleep")
    model.fire()
    limits = {
        "MLX_SHIM_PREFILL_STALL": "1s",
        "MLX_SHIM_ON_STALL": "dump",
        "MLX_SHIM_STALL": stall,
    }
    with Server(line, model.path, tmp_path / "log", args=model.args, environ=ON | limits) as server:
        assert server.wait_exit() == 78
        assert "the self-check failed: --model" in server.shim_lines()[-1]


@pytest.mark.control("unproven_model")
def test_control_a_death_in_the_first_request(faulty, tmp_path):
    model = faulty(kind="RuntimeError")
    model.fire()
    with Server(NEWEST, model.path, tmp_path / "log", args=model.args, environ=OFF) as server:
        says_ok(server)
        server.send_and_leave({"prompt": "x"})
        if server.wait_exit() != 70:
            raise Inconclusive(server.text()[-2000:])


def test_without_a_model_nothing_is_proved(tmp_path):
    environ = ON | {"MLX_SHIM_DEBUG": "1"}
    with Server(NEWEST, None, tmp_path / "log", environ=environ) as server:
        says_ok(server)
        assert "self-check was" not in server.text()
