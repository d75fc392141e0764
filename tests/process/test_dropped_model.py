"""Whatever a request names, the model of the others stays loaded and their streams go on.

In stock it costs every client its model.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
import time

import pytest

from kit.harness import Inconclusive, Server
from kit.model_folders import HUB_NAME, Folders
from kit.streams import Stream

OFF = {f"MLX_SHIM_{name}": "0" for name in ("DROPPED_MODEL", "NEEDLESS_RELOAD", "ANY_MODEL")}
# Tokens. Each takes 20 ms, until the model is told to hurry. Stock takes up new requests every half
# second.
LONG, SHORT = 500, 3


class SlowHub(http.server.BaseHTTPRequestHandler):
    """A hub that has no model, and is slow to say so about org/slow."""

    asked, released = threading.Event(), threading.Event()

    def do_GET(self):
        if "slow" in self.path:
            SlowHub.asked.set()
            SlowHub.released.wait(60)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    SlowHub.asked.clear()
    SlowHub.released.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_OFFLINE": None}
    server.shutdown()
    server.server_close()


@pytest.fixture
def folders(tmp_path, faulty):
    return Folders(tmp_path, faulty)


def serve(line, folders, **environ):
    """Serve the model under its name in the hub's cache."""
    return Server(
        line,
        HUB_NAME,
        folders.root / "log",
        args=("--trust-remote-code",),
        environ=folders.environ | environ,
    )


def start_four(server, tag):
    usual = {"max_tokens": LONG, "temperature": 0, "stream_options": {"include_usage": True}}
    streams = [Stream(server, {"prompt": f"{tag} {n}", **usual}) for n in range(4)]
    assert all(stream.first.wait(30) for stream in streams)
    return streams


def texts(streams):
    for stream in streams:
        stream.join()
        assert (stream.status, stream.done, stream.error) == (200, True, None), stream.lines[-3:]
        assert list(stream.events)[-1]["usage"]["completion_tokens"] == LONG
    return [stream.text for stream in streams]


@pytest.mark.guard("dropped_model", "needless_reload")
def test_no_request_costs_others_their_model(line, folders):
    """Streams go on while requests name what cannot be loaded, or the model by its other names."""
    with serve(line, folders) as server:
        server.ready()
        folders.model.hurry()
        expected = texts(start_four(server, "undisturbed"))
        folders.model.take_its_time()
        broken = list(folders.broken())
        streams = start_four(server, "undisturbed")
        began = time.monotonic()
        for named, status, code, says in broken:
            got, answer = server.post({"prompt": "x", "max_tokens": 1, **named})
            assert "error" in answer, (str(named)[:80], answer)
            told = str(named)[:80], answer
            assert (got, answer["error"]["code"]) == (status, code), told
            assert answer["error"]["param"] == list(named)[-1], told
            assert says in answer["error"]["message"], told
            assert len(answer["error"]["message"]) < 500, told
        print(f"{line}: {len(broken)} requests in {time.monotonic() - began:.2f} s")
        assert any(stream.thread.is_alive() for stream in streams), (
            "all this was to happen beside them"
        )
        folders.model.hurry()
        assert texts(streams) == expected
        folders.model.take_its_time()
        beside = Stream(server, {"prompt": "beside", "max_tokens": LONG, "model": "default_model"})
        assert beside.first.wait(30)
        names = [
            HUB_NAME,
            str(folders.snapshot),
            f"{folders.snapshot}/",
            str(folders.root / "link"),
        ]
        body = {"max_tokens": SHORT, "draft_model": None}
        aliases = [
            Stream(server, {"prompt": f"alias {name}", "model": name, **body}) for name in names
        ]
        for name, alias in zip(names, aliases, strict=True):
            assert {event["model"] for event in alias.join().events} == {name}, (
                "in the answer it is what was asked for"
            )
            assert (alias.status, alias.done) == (200, True)
        assert beside.thread.is_alive(), "a short request waited for a long one"
        folders.model.hurry()
        beside.join()
        assert folders.model.loads == 1, "loaded again"
        a_late_failure(server, folders)


def a_late_failure(server, folders):
    """A model that looks well fails when it is loaded.

    The former model is back before the next request, as it was.
    """
    usual = {"prompt": "as before", "max_tokens": 20, "temperature": 0}
    expected = server.post(usual)[1]["choices"][0]["text"]
    late = {"prompt": "x", "model": str(folders.lacks_a_tensor("late"))}
    status, answer = server.post(late)
    assert (status, answer["error"]["code"]) == (500, "model_load_failed")
    assert folders.model.loads == 2
    assert any("is loaded again" in said for said in server.shim_lines())
    folders.model.take_its_time()
    beside = Stream(server, {"prompt": "batched", "max_tokens": LONG})
    assert beside.first.wait(30)
    assert server.post({"prompt": "a guest", "max_tokens": SHORT})[0] == 200
    assert beside.thread.is_alive(), "served alone, not in a batch"
    folders.model.hurry()
    beside.join()
    assert server.post(usual)[1]["choices"][0]["text"] == expected
    assert folders.model.loads == 2
    config = folders.snapshot / "config.json"
    os.rename(config, folders.root / "aside")
    assert server.post(late)[0] == 500
    assert any(
        "could not be loaded again, no model is loaded" in said for said in server.shim_lines()
    )
    os.rename(folders.root / "aside", config)
    assert server.post(usual)[1]["choices"][0]["text"] == expected, "a later request may try"
    assert server.get("/health")[0] == 200


@pytest.mark.guard("any_model", "dropped_model")
def test_only_allowed_models(line, folders, hub):
    """An allowed model is loaded as by stock: with adapters, with a draft model, from the hub."""
    other, second, adapter = (
        folders.like("other"),
        folders.like("second"),
        folders.adapter("adapter"),
    )
    (folders.root / "other-link").symlink_to(other)
    allowed = {"MLX_SHIM_ALLOWED_MODELS": f"{other}, some/name,org/slow, {adapter}"}
    with serve(line, folders, **hub, **allowed) as server:
        server.ready()
        for named in (
            {"model": str(second)},
            {"draft_model": str(second)},
            {"adapters": str(second)},
            {"model": "/"},
        ):
            status, answer = server.post({"prompt": "x", **named})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert answer["error"]["param"] == next(iter(named))
            assert "not among the models" in answer["error"]["message"]
        status, answer = server.post({"prompt": "x", "model": "some/name"})
        assert (status, "does not exist" in answer["error"]["message"]) == (404, True)
        for n, name in enumerate(
            (HUB_NAME, folders.snapshot, "default_model", other, folders.root / "other-link")
        ):
            assert (
                server.post({"prompt": f"allowed {n}", "max_tokens": 2, "model": str(name)})[0]
                == 200
            )
        assert folders.model.loads == 1
        usual = {
            "prompt": "who are you",
            "max_tokens": 20,
            "temperature": 0,
            "model": str(folders.snapshot),
        }
        beside = Stream(server, {"prompt": "beside", "max_tokens": LONG, "model": str(other)})
        assert beside.first.wait(30)
        plain = server.post(usual)[1]["choices"][0]["text"]
        assert folders.model.loads == 2, "other was loaded in between"
        adapted = server.post({**usual, "adapters": str(adapter)})
        assert (adapted[0], folders.model.loads) == (200, 3), "with adapters it is another model"
        assert adapted[1]["choices"][0]["text"] != plain
        drafted = server.post({**usual, "draft_model": str(other)})
        assert (drafted[0], folders.model.loads) == (200, 4), "and with a draft"
        assert server.post(usual)[1]["choices"][0]["text"] == plain
        assert folders.model.loads == 5
        a_slow_hub(server, folders)


def a_slow_hub(server, folders):
    """No other client waits while the shim asks the hub for a model that it does not have."""
    slow = Stream(server, {"prompt": "x", "model": "org/slow"})
    assert SlowHub.asked.wait(30)
    assert server.post({"prompt": "meanwhile", "max_tokens": SHORT})[0] == 200
    assert slow.thread.is_alive(), "the hub was to be slow"
    SlowHub.released.set()
    slow.join()
    assert slow.status == 404
    assert json.loads(slow.lines[0])["error"]["code"] == "model_not_found"
    assert folders.model.loads == 5


@pytest.mark.control("dropped_model", "needless_reload", "any_model")
def test_control_stock_pays(line, folders):
    """The faults of all three guards, in one server without them."""
    other = folders.like("other")
    with serve(line, folders, MLX_SHIM_ALLOWED_MODELS="some/name", **OFF) as server:
        server.ready()
        server.post({"prompt": "x", "model": "/no/such/model"})
        server.post({"prompt": "y", "max_tokens": 1})
        expect(folders.model.loads > 1, "the model stays loaded after a typing error")
        server.post({"prompt": "z", "max_tokens": 1})
        beside = Stream(server, {"prompt": "beside", "max_tokens": 100})
        assert beside.first.wait(30)
        server.post({"prompt": "alias", "max_tokens": SHORT, "model": str(folders.root / "link")})
        expect(not beside.thread.is_alive() or beside.done, "an alias is served beside")
        before = folders.model.loads
        server.post({"prompt": "x", "model": str(folders.lacks_a_tensor("late"))})
        expect(folders.model.loads == before, "the former model is back after a late failure")
        status, _ = server.post({"prompt": "x", "max_tokens": 1, "model": str(other)})
        expect(status == 200, "a model that is not allowed is refused")


def expect(fault, otherwise):
    """The negative control: stock shows its fault at once."""
    if not fault:
        raise Inconclusive(otherwise)
