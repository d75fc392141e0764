"""Whatever a request names, the model of the others stays loaded and their streams go on. In stock it costs everybody."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import threading
import time

import mlx.core as mx
import pytest
from harness import Inconclusive, Server, Stream

from shim.cli import tiny_model

HUB_NAME = "test/tiny"
OFF = {f"MLX_SHIM_{name}": "0" for name in ("DROPPED_MODEL", "NEEDLESS_DRAIN", "ANY_MODEL")}
# Tokens; each takes 20 ms. Stock takes up new requests every half second.
LONGER, LONG, SHORT = 100, 60, 3


class Folders:
    """The model served, in a hub's cache as the hub lays it out, and others that cannot be loaded."""

    def __init__(self, root, faulty):
        self.root = root
        self.model = faulty(kind="RuntimeError", delay=0.02)
        cached = root / "hub" / "hub" / "models--test--tiny"
        self.snapshot = cached / "snapshots" / ("a" * 40)
        self.snapshot.parent.mkdir(parents=True)
        os.rename(self.model.path, self.snapshot)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("a" * 40)
        (root / "link").symlink_to(self.snapshot)
        self.environ = {"HF_HOME": str(root / "hub")}

    def like(self, name, **config):
        """A copy of the tiny model."""
        return tiny_model.make(self.root / name, **config)

    def lacks_a_tensor(self, name):
        """Passes every look at its files, and fails when it is loaded."""
        folder = self.like(name)
        raw = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header["no.such.weight"] = header.pop("model.norm.weight")
        encoded = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])
        return folder

    def adapter(self, name):
        """One that changes what the model says."""
        folder = self.root / name
        folder.mkdir()
        lora = {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps({"num_layers": 1, "lora_parameters": lora}))
        at = "model.layers.1.self_attn.q_proj.lora_"
        sides = {f"{at}a": mx.ones((tiny_model.HIDDEN, 2)), f"{at}b": mx.ones((2, tiny_model.HIDDEN))}
        mx.save_safetensors(str(folder / "adapters.safetensors"), sides)
        return folder

    def broken(self):
        """(what a request names, the status, the code, what the message says) for everything that can be told at once."""
        missing = {
            "": "no config.json", "~": "does not exist", "no/such": "does not exist", "/no/such/model": "does not exist",
            "../nothing": "does not exist", "a\0b": "does not exist", "x" * 100_000: "cannot be looked up",
            "https://example.org/a/b": "does not exist", "file:///etc": "does not exist", "\ud800": "does not exist",
        }  # fmt: skip
        for name, says in missing.items():
            status, code = (404, "model_not_found") if name else (400, "invalid_value")
            yield {"model": name}, status, code, says
        for name, says in self.unloadable():
            yield {"model": str(name)}, 400, "invalid_value", says
            yield {"draft_model": str(name)}, 400, "invalid_value", says
        for value in (5, ["x"], {"a": "b"}, True):
            yield {"draft_model": value}, 400, "invalid_value", "a string or null"
        yield {"draft_model": "no/such"}, 404, "model_not_found", "does not exist"
        # Beside the name default_model, 0.32 passes over the adapters of a request.
        yield {"model": str(self.snapshot), "adapters": "/no/such"}, 404, "model_not_found", "does not exist"
        yield {"model": str(self.snapshot), "adapters": str(self.root)}, 400, "invalid_value", "no adapter_config.json"
        adapter = self.root / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"num_layers": 2}')
        yield {"model": str(self.snapshot), "adapters": str(adapter)}, 400, "invalid_value", "no lora_parameters"

    def unloadable(self):
        def config(name, text):
            folder = self.like(name)
            (folder / "config.json").write_text(text)
            return folder

        def less(name, file, link=None, text=None):
            folder = self.like(name)
            (folder / file).unlink()
            if link:
                (folder / file).symlink_to(link)
            if text:
                (folder / file).write_text(text)
            return folder

        yield "/dev/zero", "not a folder"
        yield self.snapshot / "config.json", "not a folder"
        yield config("no-json", "{"), "config.json cannot be parsed"
        yield config("deep", "[" * 10**6), "config.json cannot be parsed"
        yield config("list", "[]"), "not a JSON object"
        yield config("no-type", "{}"), "no model_type"
        yield config("odd-type", '{"model_type": ["llama"]}'), "cannot be loaded"
        yield config("unknown", '{"model_type": "no_such_type"}'), "not supported"
        yield config("no-shape", '{"model_type": "llama"}'), "hidden_size"
        yield config("no-code", '{"model_type": "llama", "model_file": "model.py"}'), "model.py"
        yield less("no-config", "config.json"), "no config.json"
        yield less("endless", "config.json", link="/dev/zero"), "not a regular file"
        yield less("cyclic", "config.json", link="config.json"), "no config.json"
        yield less("no-weights", "model.safetensors"), "no model*.safetensors"
        yield less("pointer", "model.safetensors", text="version https://git-lfs.github.com/spec/v1\n"), "cut short"
        cut = self.like("cut")
        os.truncate(cut / "model.safetensors", 300_000)
        yield cut, "cut short"
        no_tokenizer = less("no-tokenizer", "tokenizer.json")
        (no_tokenizer / "tokenizer_config.json").unlink()
        yield no_tokenizer, "no file of a tokenizer"
        for name in ("config.json", "generation_config.json"):
            pipe = self.like(f"pipe-{name}")
            (pipe / name).unlink(missing_ok=True)
            os.mkfifo(pipe / name)
            yield pipe, "not a regular file"
        closed = self.like("closed")
        closed.chmod(0)  # nothing to root, who then finds nothing to read
        if os.geteuid() == 0:
            shutil.rmtree(closed)
            closed.mkdir()
        yield closed, "cannot be loaded"


class SlowHub(http.server.BaseHTTPRequestHandler):
    """A hub that has no model, and takes its time to say so about org/slow."""

    asked = threading.Event()

    def do_GET(self):
        if "slow" in self.path:
            SlowHub.asked.set()
            time.sleep(1.5)
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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_OFFLINE": None}
    server.shutdown()
    server.server_close()


@pytest.fixture
def folders(tmp_path, faulty):
    return Folders(tmp_path, faulty)


def serve(line, folders, **environ):
    """Under its name in the hub's cache."""
    return Server(
        line, HUB_NAME, folders.root / "log", args=("--trust-remote-code",), environ=folders.environ | environ
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


def test_no_request_costs_others_their_model(line, folders):
    """Streams run on beside everything that cannot be loaded, and beside other names of the model itself."""
    with serve(line, folders) as server:
        server.ready()
        expected = texts(start_four(server, "undisturbed"))
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
        assert any(stream.thread.is_alive() for stream in streams), "all this was to happen beside them"
        assert texts(streams) == expected
        beside = Stream(server, {"prompt": "beside", "max_tokens": LONGER, "model": "default_model"})
        assert beside.first.wait(30)
        names = [HUB_NAME, str(folders.snapshot), f"{folders.snapshot}/", str(folders.root / "link")]
        body = {"max_tokens": SHORT, "draft_model": None}
        aliases = [Stream(server, {"prompt": f"alias {name}", "model": name, **body}) for name in names]
        for name, alias in zip(names, aliases, strict=True):
            assert {event["model"] for event in alias.join().events} == {name}, "in the answer it is what was asked for"
            assert (alias.status, alias.done) == (200, True)
        assert beside.thread.is_alive(), "a short request waited for a long one"
        beside.join()
        assert folders.model.loads == 1, "loaded again"
        a_late_failure(server, folders)


def a_late_failure(server, folders):
    """What looks well and fails when it is loaded: the former model is back before the next request, as it was."""
    usual = {"prompt": "as before", "max_tokens": 20, "temperature": 0}
    expected = server.post(usual)[1]["choices"][0]["text"]
    late = {"prompt": "x", "model": str(folders.lacks_a_tensor("late"))}
    status, answer = server.post(late)
    assert (status, answer["error"]["code"]) == (500, "model_load_failed")
    assert folders.model.loads == 2
    assert any("is loaded again" in said for said in server.shim_lines())
    beside = Stream(server, {"prompt": "batched", "max_tokens": LONGER})
    assert beside.first.wait(30)
    assert server.post({"prompt": "a guest", "max_tokens": SHORT})[0] == 200
    assert beside.thread.is_alive(), "served alone, not in a batch"
    beside.join()
    assert server.post(usual)[1]["choices"][0]["text"] == expected
    assert folders.model.loads == 2
    config = folders.snapshot / "config.json"
    os.rename(config, folders.root / "aside")
    assert server.post(late)[0] == 500
    assert any("could not be loaded again, no model is loaded" in said for said in server.shim_lines())
    os.rename(folders.root / "aside", config)
    assert server.post(usual)[1]["choices"][0]["text"] == expected, "a later request may try"
    assert server.get("/health")[0] == 200


def test_only_allowed_models(line, folders, hub):
    """And what is allowed is loaded, as stock has it: with adapters, with a draft model, from the hub."""
    other, second, adapter = folders.like("other"), folders.like("second"), folders.adapter("adapter")
    (folders.root / "other-link").symlink_to(other)
    allowed = {"MLX_SHIM_ALLOWED_MODELS": f"{other}, some/name,org/slow, {adapter}"}
    with serve(line, folders, **hub, **allowed) as server:
        server.ready()
        for named in ({"model": str(second)}, {"draft_model": str(second)}, {"adapters": str(second)}, {"model": "/"}):
            status, answer = server.post({"prompt": "x", **named})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert answer["error"]["param"] == next(iter(named))
            assert "not among the models" in answer["error"]["message"]
        status, answer = server.post({"prompt": "x", "model": "some/name"})
        assert (status, "does not exist" in answer["error"]["message"]) == (404, True)
        for n, name in enumerate((HUB_NAME, folders.snapshot, "default_model", other, folders.root / "other-link")):
            assert server.post({"prompt": f"allowed {n}", "max_tokens": 2, "model": str(name)})[0] == 200
        assert folders.model.loads == 1
        usual = {"prompt": "who are you", "max_tokens": 20, "temperature": 0, "model": str(folders.snapshot)}
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
    """Nobody waits while the hub is asked for a model that it does not have."""
    slow = Stream(server, {"prompt": "x", "model": "org/slow"})
    assert SlowHub.asked.wait(30)
    assert server.post({"prompt": "meanwhile", "max_tokens": SHORT})[0] == 200
    assert slow.thread.is_alive(), "the hub was to be slow"
    slow.join()
    assert slow.status == 404
    assert json.loads(slow.lines[0])["error"]["code"] == "model_not_found"
    assert folders.model.loads == 5


def test_control_stock_pays(line, folders):
    """The faults of all three guards, in one server without them."""
    other = folders.like("other")
    with serve(line, folders, MLX_SHIM_ALLOWED_MODELS="some/name", **OFF) as server:
        server.ready()
        server.post({"prompt": "x", "model": "/no/such/model"})
        server.post({"prompt": "y", "max_tokens": 1})
        expect(folders.model.loads > 1, "the model stays loaded after a typing error")
        server.post({"prompt": "z", "max_tokens": 1})
        beside = Stream(server, {"prompt": "beside", "max_tokens": LONGER})
        assert beside.first.wait(30)
        server.post({"prompt": "alias", "max_tokens": SHORT, "model": str(folders.root / "link")})
        expect(not beside.thread.is_alive() or beside.done, "an alias is served beside")
        before = folders.model.loads
        server.post({"prompt": "x", "model": str(folders.lacks_a_tensor("late"))})
        expect(folders.model.loads == before, "the former model is back after a late failure")
        status, _ = server.post({"prompt": "x", "max_tokens": 1, "model": str(other)})
        expect(status == 200, "a model that is not allowed is refused")


def expect(fault, otherwise):
    """The negative control: stock's fault is there to be seen, at once."""
    if not fault:
        raise Inconclusive(otherwise)
