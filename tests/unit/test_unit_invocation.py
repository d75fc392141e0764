"""Which commands start the server under the shim, and which variables hold a secret."""

from __future__ import annotations

import pytest

from shim.core import settings
from shim.units import Refused, environ, invocation

WAYS = [
    (("python", "-m", "mlx_lm", "server", "--port", "1"), ("mlx_lm", "", ("--port", "1"))),
    (("python3.11", "-um", "mlx_lm.server"), ("mlx_lm.server", "u", ())),
    (("/x/python", "-X", "dev", "-W", "error", "-mmlx_lm", "server", "a"), ("mlx_lm", "", ("a",))),
    (("python", "-IBm", "mlx_lm", "server"), ("mlx_lm", "IB", ())),
    (("/x/mlx_lm.server", "--model", "m"), ("mlx_lm.server", "", ("--model", "m"))),
    (("/x/mlx_lm", "server", "--model", "m"), ("mlx_lm", "", ("--model", "m"))),
    (("python", "/x/mlx_lm.server", "--model", "m"), ("mlx_lm.server", "", ("--model", "m"))),
    (("python", "-m", "shim", "run"), ("shim", "", ())),
    (("mlx-lm-shim", "run", "--model", "m"), ("mlx-lm-shim", "", ("--model", "m"))),
]


@pytest.mark.parametrize(("argv", "wanted"), WAYS)
def test_ways_to_start_the_server(argv, wanted):
    known = invocation.take_apart(argv)
    assert (known.program, known.flags, known.arguments) == wanted
    assert known.is_ours == (wanted[0] in ("shim", "mlx-lm-shim"))


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("python",),
        ("python", "-m"),
        ("python", "-m", "mlx_lm", "generate"),
        ("python", "-m", "mlx_lm"),
        ("python", "-c", "import mlx_lm"),
        ("uv", "run", "mlx_lm.server"),
        ("python", "server.py"),
        ("mlx-lm-shim", "doctor"),
        ("sh", "-c", "mlx_lm.server"),
    ],
)
def test_what_starts_no_server(argv):
    with pytest.raises(Refused, match="accepted: PYTHON -m mlx_lm server"):
        invocation.take_apart(argv)


def test_options_of_the_server_are_read_as_argparse_does():
    arguments = ("--mod=a", "--port", "1", "--model", "b", "--po=2", "--prompt-cache-size", "3")
    assert invocation.option(arguments, *invocation.MODEL) == (3, "b")
    assert invocation.option(arguments, *invocation.PORT) == (5, "2")
    assert invocation.option(arguments, *invocation.HOST) is None
    assert invocation.replace_option(arguments, 5, "4")[5] == "--po=4"
    assert invocation.replace_option(arguments, 3, "c")[3:5] == ["--model", "c"]


def test_the_interpreter_of_a_console_script(tmp_path):
    script = tmp_path / "mlx_lm.server"
    for text, wanted in {
        "#!/x/python -sE\n": ["/x/python", "-sE"],
        "#!/usr/bin/env python3\n": ["python3"],
        "#!/bin/sh\n'''exec' \"/a b/python\" \"$0\" \"$@\"\n' '''\n": ["/a b/python"],
        "#!/bin/sh\n'''exec' /x/python -E \"$0\" \"$@\"\n' '''\n": ["/x/python", "-E"],
    }.items():
        script.write_text(text)
        assert invocation.interpreter_of(script) == wanted
    script.write_text("\x7fELF")
    with pytest.raises(Refused, match="not a console script"):
        invocation.interpreter_of(script)


@pytest.mark.parametrize("name", [row.variable for row in settings.table()])
def test_no_setting_of_the_shim_counts_as_a_secret(name):
    assert environ.secret(name, "1") == ""


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MLX_METAL_FAST_SYNCH", "HF_TOKEN_PATH", "KEYBOARD"]
)
def test_what_is_no_secret(name):
    assert environ.secret(name, "/some/path") == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("DB_PASSWORD", "x"),
        ("HFTOKEN", "x"),
        ("X", "hf_abcdefghijklmno"),
        ("HTTPS_PROXY", "http://me:word@proxy:1"),
    ],
)
def test_what_is_a_secret(name, value):
    assert "can be read by others" in environ.secret(name, value)
