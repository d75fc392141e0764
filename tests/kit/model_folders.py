"""Model folders that a request may name: one that is served, and many that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil

import mlx.core as mx

from shim.cli import tiny_model

HUB_NAME = "test/tiny"


def weightless(folder, size, dtype="BF16", **config):
    """A model whose weights have `size` bytes, all of them a hole in a file.

    A test can look at its size, but not load it.
    """
    folder.mkdir(parents=True)
    header = {"weight": {"dtype": dtype, "shape": [1], "data_offsets": [0, size - 4096]}}
    encoded = json.dumps(header).encode().ljust(4096 - 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(size)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Folders:
    """The served model, in the cache of a hub, and others that cannot be loaded."""

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
        """A model whose files look right, and which fails when it is loaded."""
        folder = self.like(name)
        raw = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header["no.such.weight"] = header.pop("model.norm.weight")
        encoded = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(
            len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :]
        )
        return folder

    def adapter(self, name):
        """An adapter that changes what the model says."""
        folder = self.root / name
        folder.mkdir()
        lora = {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
        (folder / "adapter_config.json").write_text(
            json.dumps({"num_layers": 1, "lora_parameters": lora})
        )
        at = "model.layers.1.self_attn.q_proj.lora_"
        sides = {
            f"{at}a": mx.ones((tiny_model.HIDDEN, 2)),
            f"{at}b": mx.ones((2, tiny_model.HIDDEN)),
        }
        mx.save_safetensors(str(folder / "adapters.safetensors"), sides)
        return folder

    def broken(self):
        """Yields every bad name that can be refused at once.

        Each as (fields of the request, status, code, a part of the message).
        """
        missing = {
            "": "no config.json",
            "~": "does not exist",
            "no/such": "does not exist",
            "/no/such/model": "does not exist",
            "../nothing": "does not exist",
            "a\0b": "does not exist",
            "x" * 100_000: "cannot be looked up",
            "https://example.org/a/b": "does not exist",
            "file:///etc": "does not exist",
        }
        for name, says in missing.items():
            status, code = (404, "model_not_found") if name else (400, "invalid_value")
            yield {"model": name}, status, code, says
        for name, says in self.unloadable():
            yield {"model": str(name)}, 400, "invalid_value", says
            yield {"draft_model": str(name)}, 400, "invalid_value", says
        for value in (5, ["x"], {"a": "b"}, True):
            yield {"draft_model": value}, 400, "invalid_value", "a string or null"
        yield {"draft_model": "no/such"}, 404, "model_not_found", "does not exist"
        # Together with the name default_model, 0.32 ignores the adapters of a request.
        yield (
            {"model": str(self.snapshot), "adapters": "/no/such"},
            404,
            "model_not_found",
            "does not exist",
        )
        yield (
            {"model": str(self.snapshot), "adapters": str(self.root)},
            400,
            "invalid_value",
            "no adapter_config.json",
        )
        adapter = self.root / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"num_layers": 2}')
        yield (
            {"model": str(self.snapshot), "adapters": str(adapter)},
            400,
            "invalid_value",
            "no lora_parameters",
        )

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
        yield (
            less(
                "pointer", "model.safetensors", text="version https://git-lfs.github.com/spec/v1\n"
            ),
            "cut short",
        )
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
        # That does not stop root, who gets an empty folder instead.
        closed.chmod(0)
        if os.geteuid() == 0:
            shutil.rmtree(closed)
            closed.mkdir()
        yield closed, "cannot be loaded"
