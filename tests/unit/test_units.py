"""python -m shim launchd | systemd | supervisord: what is accepted, refused and printed."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

from kit.harness import NEWEST, REPO, need, python_of, taken_port
from shim.cli import unit as cli
from shim.units import launchd_keys
from shim.units.plan import OPEN_FILES

PYTHON = python_of(NEWEST)
KINDS = sorted(cli.KINDS)


def documented() -> dict[str, str]:
    """The table in docs/launchd.md: key, or key and inner key, and types."""
    page = (REPO / "docs" / "launchd.md").read_text()
    lines = page.partition("\n## Keys of launchd.plist\n")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {key.replace("`", ""): types for key, types in rows}


TYPES = {"string": str, "boolean": bool, "integer": int, "array": list, "dictionary": dict}


def check_plist(plist) -> None:
    """Check that every key is documented, and that its value has a documented type."""
    table = documented()

    def check(name, value):
        assert name in table, name
        assert type(value) in [TYPES[t] for t in table[name].split(" or ")], name

    for key, value in plist.items():
        check(key, value)
        inner = value if key in launchd_keys.WITHIN and isinstance(value, dict) else {}
        for held in inner.values() if key == "Sockets" else [inner]:
            for name, what in held.items():
                check(f"{key} {name}", what)
    for values in (plist["ProgramArguments"], plist["EnvironmentVariables"].values()):
        assert all(isinstance(value, str) for value in values)


def test_the_documented_keys_are_those_that_check_knows():
    within = {
        f"{key} {name}": t
        for key, names in launchd_keys.WITHIN.items()
        for name, t in names.items()
    }
    assert documented() == launchd_keys.KEYS | within


@pytest.mark.parametrize("more", [(), ("--socket",), ("--daemon", "--user", "root")])
def test_the_plist(shim, model, tmp_path, more):
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", model)
    status, out, err = shim("launchd", *more, "--env", "MLX_SHIM_DRAIN=1m", "--", *command)
    assert status == 0, err
    assert shim("launchd", *more, "--env", "MLX_SHIM_DRAIN=1m", "--", *command)[1] == out, (
        "the same every time"
    )
    plist = plistlib.loads(out.encode())
    check_plist(plist)
    assert plist["ProgramArguments"] == list(command)
    assert plist["EnvironmentVariables"]["PYTHONPATH"] == str(REPO)
    assert plist["KeepAlive"] is True
    assert plist["ExitTimeOut"] == 60 + 1 + 5
    assert plist["ThrottleInterval"] == 10
    assert (
        plist["SoftResourceLimits"] == plist["HardResourceLimits"] == {"NumberOfFiles": OPEN_FILES}
    )
    assert plist["ProcessType"] == "Interactive"
    assert plist["RunAtLoad"] is True
    assert plist["StandardOutPath"] == plist["StandardErrorPath"]
    assert plist.get("UserName") == ("root" if "--user" in more else None)
    if "--socket" in more:
        assert plist["Sockets"] == {
            "Listener": {"SockNodeName": "127.0.0.1", "SockServiceName": "8080"}
        }
        assert plist["EnvironmentVariables"]["MLX_SHIM_LAUNCHD_SOCKET"] == "Listener"


SECTIONS = {
    "systemd": """
        StartLimitIntervalSec=0
        Restart=always
        RestartSec=1
        KillSignal=SIGTERM
        KillMode=mixed
        TimeoutStopSec=66
        LimitNOFILE=4096
        WorkingDirectory=/
    """,
    # It has no limits for a program. The advice says what to use instead of LimitNOFILE.
    "supervisord": """
        autostart=true
        autorestart=true
        startsecs=1
        startretries=1000000
        stopsignal=TERM
        stopwaitsecs=66
        stopasgroup=false
        killasgroup=true
        redirect_stderr=true
        directory=/
    """,
}


@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("socket", [(), ("--socket",)])
def test_what_the_other_units_say(shim, model, tmp_path, kind, socket):
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", model)
    status, out, err = shim(
        kind, *socket, "--env", "MLX_SHIM_DRAIN=1m", "--output", tmp_path, "--", *command
    )
    assert status == 0, err
    said = Path(out.splitlines()[0]).read_text().splitlines()
    wanted = SECTIONS[kind].split()
    assert [line for line in wanted if said.count(line) != 1] == []


def test_plistutil_reads_it(shim, model, tmp_path):
    plistutil = need("plistutil")
    file = tmp_path / "plist"
    arguments = ("-m", "mlx_lm", "server", "--model", model, "--chat-template", '{"a": "<&>"} ü')
    file.write_text(shim("launchd", "--socket", "--", PYTHON, *arguments)[1])
    binary = tmp_path / "binary"
    subprocess.run([plistutil, "-i", str(file), "-o", str(binary), "-f", "bin"], check=True)
    assert binary.read_bytes().startswith(b"bplist00")
    assert plistlib.loads(binary.read_bytes()) == plistlib.loads(file.read_bytes())
    assert shim("launchd", "--check", binary)[0] == 0


@pytest.mark.parametrize("more", [(), ("--daemon",), ("--socket", "--notify", "--daemon")])
def test_systemd_takes_the_service(shim, model, tmp_path, more):
    analyze = need("systemd-analyze")
    log = tmp_path / "100% log"
    status, out, err = shim(
        "systemd",
        "--name",
        "local-mlx",
        "--output",
        tmp_path,
        "--log",
        log,
        *more,
        "--",
        PYTHON,
        "-m",
        "mlx_lm",
        "server",
        "--model",
        model,
        "--chat-template",
        "100% of $HOME \"'\\",
    )
    assert status == 0, err
    files = out.split()
    assert [Path(f).suffix for f in files] == (
        [".service", ".socket"] if "--socket" in more else [".service"]
    )
    for manager in ((), ("--user",)):
        if manager and "--daemon" in more:
            continue
        verified = subprocess.run(
            [analyze, *manager, "verify", "--man=no", *files],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        )
        ours = [
            line for line in (verified.stdout + verified.stderr).splitlines() if "local-mlx" in line
        ]
        assert (verified.returncode, ours) == (0, []), verified.stderr
    assert shim("systemd", "--check", files[0]) == (
        0,
        f"{files[0]}: nothing in it defeats the shim\n",
        "",
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("socket", [(), ("--socket",)])
def test_what_is_made_passes_its_own_check(shim, model, tmp_path, kind, socket):
    status, out, err = shim(
        kind, *socket, "--output", tmp_path, "--", PYTHON, "-m", "mlx_lm.server", "--model", model
    )
    assert status == 0, err
    file = out.split("\n")[0]
    status, said, err = shim(kind, "--check", file)
    assert (status, said.splitlines()[-1], err) == (
        0,
        f"{file}: nothing in it defeats the shim",
        "",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_unit_on_stdout_and_the_same_every_time(model, kind, tmp_path):
    """In two processes, whose sets of strings have another order because of another hash."""
    shell = [("MLX_SHIM_STRICT", "1"), ("MLX_SHIM_DRAIN", "1m"), ("MLX_SHIM_MAX_INFLIGHT", "8")]
    command = [
        PYTHON,
        "-m",
        "shim",
        kind,
        "--env",
        "B=2",
        "--env",
        "A=1",
        "--",
        PYTHON,
        "-m",
        "mlx_lm",
        "server",
    ]
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = []
    for seed, given in (("1", shell), ("2", reversed(shell))):
        child = subprocess.run(
            [*command, "--model", model],
            cwd=REPO,
            env=kept | dict(given) | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append((child.stdout, child.stderr))
    assert said[0] == said[1]
    assert said[0][0].startswith(
        {"launchd": "<?xml", "systemd": "[Unit]", "supervisord": "[program:"}[kind]
    )
    assert all(name in said[0][0] for name, _ in shell)


def test_refusals_say_what_was_given_and_what_is_accepted(shim, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = ("-m", "mlx_lm", "server")
    wrapper = tmp_path / "python3"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -c "raise SystemExit(3)"\n')
    wrapper.chmod(0o755)
    bare = tmp_path / "mlx_lm.server"
    bare.write_text(f"#!{PYTHON} -E\n")
    bare.chmod(0o755)
    other = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else None
    cases = [
        ([], "no server command was given"),
        (["--"], "no server command was given"),
        (["--", "X=1", PYTHON, *server], "give it as --env X=VALUE"),
        (["--", "/no/python", *server], "'/no/python' does not exist"),
        (["--", "no-such-python", *server], "is not on PATH"),
        (["--", model, *server], "is not a program that can be run"),
        (["--", PYTHON, "-I", *server], "-I isolates Python from PYTHONPATH"),
        (["--", PYTHON, "-uE", *server], "-E makes Python ignore PYTHONPATH"),
        (["--", PYTHON, "-S", *server], "-S makes Python import no sitecustomize"),
        (["--", "./mlx_lm.server"], "-E makes Python ignore PYTHONPATH"),
        (["--", "./python3", *server], "is not a Python that can run: status 3"),
        (
            ["--", PYTHON, *server, "--model", "./nothing"],
            "--model './nothing' does not exist; accepted: a folder",
        ),
        (["--", PYTHON, *server, "--model", "a/b/c"], "does not exist; accepted: a folder"),
        (["--", PYTHON, *server, "--adapter-path", "a/b"], "--adapter-path 'a/b' does not exist"),
        (["--", PYTHON, *server, "--port", "x"], "--port 'x' is not a port"),
        (["--", PYTHON, *server, "--port", "0"], "accepted: 1 to 65535"),
        (["--", PYTHON, *server, "--model", "a\nb"], "has a newline"),
        (["--env", "X", "--", PYTHON, *server], "--env takes NAME=VALUE"),
        (["--env", "HF_TOKEN=abc", "--", PYTHON, *server], "the hub's token file"),
        (["--env", "OPENAI_API_KEY=abc", "--", PYTHON, *server], "MLX_SHIM_API_KEY_FILE names one"),
        (
            ["--env", "MLX_SHIM_API_KEY=abc", "--", PYTHON, *server],
            "MLX_SHIM_API_KEY_FILE names one",
        ),
        (
            ["--env", "MLX_SHIM_API_KEY_FILE=/no/file", "--", PYTHON, *server],
            "names no file that exists",
        ),
        (
            ["--env", "MLX_SHIM_DRAIN=soon", "--", PYTHON, *server],
            "MLX_SHIM_DRAIN='soon' is not valid; accepted: a dur",
        ),
        (["--workdir", "nowhere", "--", PYTHON, *server], "--workdir 'nowhere' is not a folder"),
        (["--check", "nowhere"], "nowhere cannot be read"),
        (["--check", model, "--", PYTHON], "takes a FILE and no server command"),
    ]
    if other:
        cases.append(
            (
                ["--", other, *server],
                "has no mlx_lm; give the interpreter of the environment that has it",
            )
        )
    for arguments, says in cases:
        status, out, err = shim("launchd", *arguments)
        assert (status, out) == (2, ""), (arguments, err)
        assert says in err, arguments
    assert "abc" not in shim("launchd", "--env", "HF_TOKEN=abc", "--", PYTHON, *server)[2], (
        "a secret is not repeated"
    )
    assert shim("launchd", "--bogus", "--", PYTHON, *server)[0] == 2
    assert shim("launchd", "--label", "a b", "--", PYTHON, *server)[0] == 2
    status, out, err = shim("systemd", "--socket", "--", PYTHON, *server, "--model", model)
    assert (status, out) == (2, "")
    assert "name a folder for them with --output DIR" in err
    # The server would use 300 s instead.
    early = ("--notify", "--env", "MLX_SHIM_GIL_DEADLINE=1s")
    status, out, err = shim("systemd", *early, "--", PYTHON, *server, "--model", model)
    assert (status, out) == (2, "")
    assert (
        "MLX_SHIM_GIL_DEADLINE='1s' is not valid; accepted: 0, or a duration of at least 2s" in err
    )
    assert (
        "needs a --host that is an IP address"
        in shim("launchd", "--socket", "--", PYTHON, *server, "--host", "a.b")[2]
    )


def test_relative_paths_become_absolute_and_links_stay(shim, model, tmp_path, monkeypatch):
    venv = tmp_path / "bin"
    venv.mkdir()
    (venv / "python").symlink_to(PYTHON)
    (tmp_path / "model").symlink_to(model)
    key = tmp_path / "key"
    key.write_text("secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/not/asked/for")
    monkeypatch.setenv("MLX_SHIM_MAX_TOKENS", "100")
    monkeypatch.setenv("MLX_SHIM_API_KEY_FILE", "key")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    site = next((Path(PYTHON).parents[1] / "lib").glob("python3*")) / "site-packages"
    status, out, err = shim(
        "launchd",
        "--env",
        f"PYTHONPATH=own:{site}",
        "--",
        "bin/python",
        "-m",
        "mlx_lm",
        "server",
        "--model=model",
    )
    assert status == 0, err
    plist = plistlib.loads(out.encode())
    assert plist["ProgramArguments"] == [
        str(venv / "python"),
        "-m",
        "mlx_lm",
        "server",
        f"--model={tmp_path}/model",
    ]
    assert plist["EnvironmentVariables"] == {
        "PYTHONPATH": f"{REPO}:{tmp_path}/own:{site}",
        "MLX_SHIM_MAX_TOKENS": "100",
        "MLX_SHIM_API_KEY_FILE": str(key),
        "MLX_SHIM_MEMORY_SOFT": "70%",
        "MLX_SHIM_MEMORY_HARD": "80%",
    }
    assert "HF_HOME is set here, and the unit does not have it" in err


def test_warnings(shim, model):
    server = (PYTHON, "-m", "mlx_lm", "server")
    with taken_port() as port:
        status, _, err = shim("supervisord", "--", *server, "--model", "some/model", "--port", port)
    assert status == 0
    assert f"WARNING: port {port} is taken on 127.0.0.1" in err
    assert "WARNING: --model some/model is not in the cache of the hub" in err
    assert "WARNING: no --model" in shim("supervisord", "--", *server)[2]
    assert (
        "WARNING: MLX_SHIM is off" in shim("supervisord", "--env", "MLX_SHIM=0", "--", *server)[2]
    )


def test_a_model_in_the_cache_is_no_warning(shim, tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", "some/model")
    assert (
        "not in the cache"
        not in shim("supervisord", "--env", f"HF_HOME={tmp_path}", "--", *command)[2]
    )
