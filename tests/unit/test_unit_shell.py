"""--check FILE: a shell, or another program, between the supervisor and the server."""

from __future__ import annotations

import plistlib

import pytest

from kit.harness import NEWEST, REPO, python_of
from shim.units import check, shell

SERVER = (python_of(NEWEST), "-m", "mlx_lm", "server", "--model", "some/model")
COMMAND = " ".join(SERVER)
# Ways to run the server, and what the check says of each: a defeat, a note, or None.
WRAPPERS = {
    f"exec {COMMAND}": None,
    f"cd / && exec {COMMAND}": None,
    f"export A=1; exec {COMMAND} >> /tmp/log 2>&1": None,
    f"# start | it\nset -e\nexec \\\n {COMMAND}\n": None,
    COMMAND: "note: {}: the shell stands between",
    f"A=1 {COMMAND}": "note: {}: the shell stands between",
    f"cd /; {COMMAND}": "DEFEATS: {}: SIGTERM ends the shell, not the server",
    f"{COMMAND}; sleep 1": "DEFEATS: {}: the shell's status is that of what follows",
    f"{COMMAND} || true": "DEFEATS: {}: what follows || swallows",
    f"{COMMAND} 2>&1 | tee /tmp/log": "DEFEATS: {}: the status of a pipe",
    f"exec {COMMAND} | tee /tmp/log": "DEFEATS: {}: the status of a pipe",
    f"nohup {COMMAND} &": "DEFEATS: {}: & puts the server into the background",
    f"while true; do {COMMAND}; sleep 5; done": (
        "DEFEATS: {}: the shell's status is that of what follows"
    ),
}


@pytest.fixture
def look(tmp_path):
    """What --check says of a good plist with another command.

    With `environ` False its environment is empty too.
    """

    def look_at(argv, *, environ=True):
        file = tmp_path / "plist"
        plist = {
            "Label": "x",
            "ProgramArguments": list(argv),
            "KeepAlive": True,
            "ExitTimeOut": 40,
            "StandardErrorPath": "/log",
            "EnvironmentVariables": {"PYTHONPATH": str(REPO)} if environ else {},
            "SoftResourceLimits": {"NumberOfFiles": 4096},
        }
        file.write_bytes(plistlib.dumps(plist))
        file.chmod(0o644)
        return [str(f).removeprefix(f"{file}: ") for f in check.findings("launchd", file, REPO)]

    return look_at


@pytest.mark.parametrize(("text", "says"), WRAPPERS.items())
def test_a_shell_in_between(look, tmp_path, text, says):
    script = tmp_path / "start"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    ways = [
        ["/bin/sh", "-c", text],
        ["/bin/bash", "-lc", text],
        ["/bin/sh", str(script)],
        [str(script)],
    ]
    for argv in ways:
        said = [line for line in look(argv) if "nohup" not in line]
        if says is None:
            assert said == []
        else:
            assert len(said) == 1
            assert said[0].startswith(says.format("ProgramArguments"))


def test_a_shell_finds_programs_and_homes_by_itself(look, monkeypatch):
    monkeypatch.setenv("HOME", str(REPO.parent))
    text = (
        f"export PYTHONPATH=~/{REPO.name} && source ~/v/bin/activate"
        " && exec mlx_lm.server --model ~/m"
    )
    assert look(["/bin/zsh", "-lc", text], environ=False) == []


def test_what_a_shell_sets_counts(look):
    command = ["/bin/sh", "-c", f"export PYTHONPATH={REPO} MLX_SHIM=0\nexec {COMMAND}"]
    said = look(command, environ=False)
    assert [line for line in said if "MLX_SHIM is off" in line] == said


def test_a_shell_that_runs_its_arguments(look):
    command = ["/bin/sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *SERVER]
    assert look(command) == []
    command[2] = 'ulimit -n 4096; "$@"'
    assert look(command)[0].startswith("DEFEATS: ProgramArguments: SIGTERM ends")


def test_a_script_that_no_shell_would_take_is_not_judged():
    assert shell.look("exec 'mlx_lm.server", []) is None
