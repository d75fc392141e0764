"""python -m shim launchd | systemd | supervisord: what is accepted, refused and printed."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path

import pytest
from harness import NEWEST, REPO, need, python_of, taken_port
from model_folders import weightless

from shim import memory
from shim.cli import unit as cli
from shim.units import launchd_keys
from shim.units.plan import OPEN_FILES

PYTHON = python_of(NEWEST)
KINDS = sorted(cli.KINDS)
GIB = 1 << 30
SOFT, HARD = "MLX_SHIM_MEMORY_SOFT", "MLX_SHIM_MEMORY_HARD"


@pytest.fixture(autouse=True)
def _no_shim_in_the_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("MLX_SHIM", "HF_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "a model"
    folder.mkdir()
    return str(folder)


@pytest.fixture
def shim(capsys):
    """Run `python -m shim ARGUMENTS` in this process: (status, stdout, stderr)."""

    def run(kind, *arguments):
        try:
            status = cli.main(kind, [str(word) for word in arguments])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def documented() -> dict[str, str]:
    """The table in docs/launchd-keys.md: key, or key and inner key, and types."""
    lines = (REPO / "docs" / "launchd-keys.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {key.replace("`", ""): types for key, types in rows}


TYPES = {"string": str, "boolean": bool, "integer": int, "array": list, "dictionary": dict}


def check_plist(plist) -> None:
    """Every key is documented, and its value of a documented type."""
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
    within = {f"{key} {name}": t for key, names in launchd_keys.WITHIN.items() for name, t in names.items()}
    assert documented() == launchd_keys.KEYS | within


@pytest.mark.parametrize("more", [(), ("--socket",), ("--daemon", "--user", "root")])
def test_the_plist(shim, model, tmp_path, more):
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", model)
    status, out, err = shim("launchd", *more, "--env", "MLX_SHIM_DRAIN=1m", "--", *command)
    assert status == 0, err
    assert shim("launchd", *more, "--env", "MLX_SHIM_DRAIN=1m", "--", *command)[1] == out, "the same every time"
    plist = plistlib.loads(out.encode())
    check_plist(plist)
    assert plist["ProgramArguments"] == list(command)
    assert plist["EnvironmentVariables"]["PYTHONPATH"] == str(REPO)
    assert plist["KeepAlive"] is True
    assert plist["ExitTimeOut"] == 60 + 1 + 5
    assert plist["ThrottleInterval"] == 10
    assert plist["SoftResourceLimits"] == plist["HardResourceLimits"] == {"NumberOfFiles": OPEN_FILES}
    assert plist["ProcessType"] == "Interactive"
    assert plist["RunAtLoad"] is True
    assert plist["StandardOutPath"] == plist["StandardErrorPath"]
    assert plist.get("UserName") == ("root" if "--user" in more else None)
    if "--socket" in more:
        assert plist["Sockets"] == {"Listener": {"SockNodeName": "127.0.0.1", "SockServiceName": "8080"}}
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
    # it knows no limits of a program: the advice names what stands for LimitNOFILE
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
    status, out, err = shim(kind, *socket, "--env", "MLX_SHIM_DRAIN=1m", "--output", tmp_path, "--", *command)
    assert status == 0, err
    said = Path(out.splitlines()[0]).read_text().splitlines()
    wanted = SECTIONS[kind].split()
    assert [line for line in wanted if said.count(line) != 1] == []


# For each kind and its options: what the advice says, in this order, between "save it" and the end.
MINE = "$HOME/Library/LaunchAgents/local.mlx-lm.plist"
ALL = "/Library/LaunchDaemons/local.mlx-lm.plist"
AGENT, DAEMON = "gui/$(id -u)", "system"
SOCKETED = "mlx-lm.socket mlx-lm.service"
ROOT = ("--daemon", "--user", "root")
AGAIN = '  {0}launchctl bootout {1}/local.mlx-lm; for n in $(seq 60); do {0}launchctl bootstrap {1} "{2}" && break; sleep 1; done'
ADVICE = [
    ("launchd", (), [
        f"save it as {MINE}, then:", f'  chmod 644 "{MINE}"', f'  launchctl bootstrap {AGENT} "{MINE}"    # install',
        f"  launchctl print {AGENT}/local.mlx-lm    # look", "  tail -f ", f"  launchctl kill SIGTERM {AGENT}/local.mlx-lm ",
        f"  launchctl bootout {AGENT}/local.mlx-lm    # stop and remove", "`launchctl kickstart -k` kills at once (SIGKILL)",
        "bootout returns before the job is gone",
        AGAIN.format("", AGENT, MINE),
    ]),
    ("launchd", (*ROOT, "--socket"), [
        f"save it as {ALL}, then:", f'  sudo chmod 644 "{ALL}" && sudo chown root:wheel "{ALL}"',
        f'  sudo launchctl bootstrap {DAEMON} "{ALL}"    # install', f"  sudo launchctl print {DAEMON}/local.mlx-lm    # look",
        "  tail -f ", f"  sudo launchctl kill SIGTERM {DAEMON}/local.mlx-lm ",
        f"  sudo launchctl bootout {DAEMON}/local.mlx-lm    # stop and remove", "`launchctl kickstart -k` kills at once",
        "bootout returns before the job is gone",
        AGAIN.format("sudo ", DAEMON, ALL),
        "Sockets: ",
    ]),
    ("systemd", (), [
        "save it in ~/.config/systemd/user, then:", "  systemctl --user daemon-reload",
        "  systemctl --user enable --now mlx-lm.service    # install", "  systemctl --user status mlx-lm    # look",
        "  journalctl --user -f -u mlx-lm", "  systemctl --user restart mlx-lm    # restart",
        "  systemctl --user disable --now mlx-lm.service    # stop and remove", "a unit of your own ends when you log out",
    ]),
    ("systemd", (*ROOT, "--socket"), [
        "save it in /etc/systemd/system, then:", "  sudo systemctl daemon-reload",
        f"  sudo systemctl enable --now {SOCKETED}    # install", "  systemctl status mlx-lm    # look",
        "  journalctl -f -u mlx-lm", "  sudo systemctl restart mlx-lm    # restart",
        f"  sudo systemctl disable --now {SOCKETED}    # stop and remove",
    ]),
    ("supervisord", (), [
        "save it as mlx-lm.conf in a folder", "  supervisorctl reread && supervisorctl update    # install",
        "  supervisorctl status mlx-lm    # look", "  supervisorctl tail -f mlx-lm",
        "  supervisorctl restart mlx-lm    # restart", "  supervisorctl stop mlx-lm    # stop; remove the file and `update`",
        "minfds in [supervisord], 1024 unless set,",
    ]),
    ("supervisord", ("--socket",), [
        "save it as mlx-lm.conf in a folder", "  supervisorctl reread && supervisorctl update    # install",
        "  supervisorctl status mlx-lm:mlx-lm_1    # look", "  supervisorctl tail -f mlx-lm:mlx-lm_1",
        "  supervisorctl restart mlx-lm:mlx-lm_1    # restart", "  supervisorctl stop mlx-lm:*    # stop; remove the file",
        "mlx-lm_0 only holds the socket",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "wanted"), ADVICE)
def test_the_commands_to_install_look_restart_and_remove(shim, model, kind, options, wanted):
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", model)
    status, _, err = shim(kind, *options, "--output", Path(model).parent, "--", *command)
    assert status == 0, err
    lines = iter(line.removeprefix("mlx-lm-shim: ") for line in err.splitlines())
    for beginning in wanted:  # each after the one before
        assert any(line.startswith(beginning) for line in lines), (beginning, err)


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
        "systemd", "--name", "local-mlx", "--output", tmp_path, "--log", log, *more,
        "--", PYTHON, "-m", "mlx_lm", "server", "--model", model, "--chat-template", "100% of $HOME \"'\\",
    )  # fmt: skip
    assert status == 0, err
    files = out.split()
    assert [Path(f).suffix for f in files] == ([".service", ".socket"] if "--socket" in more else [".service"])
    for manager in ((), ("--user",)):
        if manager and "--daemon" in more:
            continue
        verified = subprocess.run(
            [analyze, *manager, "verify", "--man=no", *files], capture_output=True, text=True, check=False,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip
        ours = [line for line in (verified.stdout + verified.stderr).splitlines() if "local-mlx" in line]
        assert (verified.returncode, ours) == (0, []), verified.stderr
    assert shim("systemd", "--check", files[0]) == (0, f"{files[0]}: nothing in it defeats the shim\n", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("socket", [(), ("--socket",)])
def test_what_is_made_passes_its_own_check(shim, model, tmp_path, kind, socket):
    status, out, err = shim(kind, *socket, "--output", tmp_path, "--", PYTHON, "-m", "mlx_lm.server", "--model", model)
    assert status == 0, err
    file = out.split("\n")[0]
    status, said, err = shim(kind, "--check", file)
    assert (status, said.splitlines()[-1], err) == (0, f"{file}: nothing in it defeats the shim", "")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_unit_on_stdout_and_the_same_every_time(model, kind, tmp_path):
    """In processes of their own, which order their sets and dictionaries of strings by another hash."""
    shell = [("MLX_SHIM_STRICT", "1"), ("MLX_SHIM_DRAIN", "1m"), ("MLX_SHIM_MAX_INFLIGHT", "8")]
    command = [PYTHON, "-m", "shim", kind, "--env", "B=2", "--env", "A=1", "--", PYTHON, "-m", "mlx_lm", "server"]
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = []
    for seed, given in (("1", shell), ("2", reversed(shell))):
        child = subprocess.run(
            [*command, "--model", model], cwd=REPO, env=kept | dict(given) | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said.append((child.stdout, child.stderr))
    assert said[0] == said[1]
    assert said[0][0].startswith({"launchd": "<?xml", "systemd": "[Unit]", "supervisord": "[program:"}[kind])
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
        (["--", model, *server], "is no program that can be run"),
        (["--", PYTHON, "-I", *server], "-I isolates Python from PYTHONPATH"),
        (["--", PYTHON, "-uE", *server], "-E makes Python ignore PYTHONPATH"),
        (["--", PYTHON, "-S", *server], "-S makes Python import no sitecustomize"),
        (["--", "./mlx_lm.server"], "-E makes Python ignore PYTHONPATH"),
        (["--", "./python3", *server], "is no Python that can run: status 3"),
        (["--", PYTHON, *server, "--model", "./nothing"], "--model './nothing' does not exist; accepted: a folder"),
        (["--", PYTHON, *server, "--model", "a/b/c"], "does not exist; accepted: a folder"),
        (["--", PYTHON, *server, "--adapter-path", "a/b"], "--adapter-path 'a/b' does not exist"),
        (["--", PYTHON, *server, "--port", "x"], "--port 'x' is not a port"),
        (["--", PYTHON, *server, "--port", "0"], "accepted: 1 to 65535"),
        (["--", PYTHON, *server, "--model", "a\nb"], "has a newline"),
        (["--env", "X", "--", PYTHON, *server], "--env takes NAME=VALUE"),
        (["--env", "HF_TOKEN=abc", "--", PYTHON, *server], "the hub's token file"),
        (["--env", "OPENAI_API_KEY=abc", "--", PYTHON, *server], "MLX_SHIM_API_KEY_FILE names one"),
        (["--env", "MLX_SHIM_API_KEY=abc", "--", PYTHON, *server], "MLX_SHIM_API_KEY_FILE names one"),
        (["--env", "MLX_SHIM_API_KEY_FILE=/no/file", "--", PYTHON, *server], "names no file that is there"),
        (["--env", "MLX_SHIM_DRAIN=soon", "--", PYTHON, *server], "MLX_SHIM_DRAIN='soon' is not valid; accepted: a dur"),
        (["--workdir", "nowhere", "--", PYTHON, *server], "--workdir 'nowhere' is no folder"),
        (["--check", "nowhere"], "nowhere cannot be read"),
        (["--check", model, "--", PYTHON], "takes a FILE and no server command"),
    ]  # fmt: skip
    if other:
        cases.append((["--", other, *server], "has no mlx_lm; give the interpreter of the environment that has it"))
    for arguments, says in cases:
        status, out, err = shim("launchd", *arguments)
        assert (status, out) == (2, ""), (arguments, err)
        assert says in err, arguments
    assert "abc" not in shim("launchd", "--env", "HF_TOKEN=abc", "--", PYTHON, *server)[2], "a secret is not repeated"
    assert shim("launchd", "--bogus", "--", PYTHON, *server)[0] == 2
    assert shim("launchd", "--label", "a b", "--", PYTHON, *server)[0] == 2
    status, out, err = shim("systemd", "--socket", "--", PYTHON, *server, "--model", model)
    assert (status, out) == (2, "")
    assert "name a folder for them with --output DIR" in err
    assert (
        "needs a --host that is an IP address" in shim("launchd", "--socket", "--", PYTHON, *server, "--host", "a.b")[2]
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
        "launchd", "--env", f"PYTHONPATH=own:{site}", "--", "bin/python", "-m", "mlx_lm", "server", "--model=model",
    )  # fmt: skip
    assert status == 0, err
    plist = plistlib.loads(out.encode())
    assert plist["ProgramArguments"] == [str(venv / "python"), "-m", "mlx_lm", "server", f"--model={tmp_path}/model"]
    assert plist["EnvironmentVariables"] == {
        "PYTHONPATH": f"{REPO}:{tmp_path}/own:{site}", "MLX_SHIM_MAX_TOKENS": "100", "MLX_SHIM_API_KEY_FILE": str(key),
        "MLX_SHIM_MEMORY_SOFT": "70%", "MLX_SHIM_MEMORY_HARD": "80%",
    }  # fmt: skip
    assert "HF_HOME is set here, and the unit does not have it" in err


def test_warnings(shim, model):
    server = (PYTHON, "-m", "mlx_lm", "server")
    with taken_port() as port:
        status, _, err = shim("supervisord", "--", *server, "--model", "some/model", "--port", port)
    assert status == 0
    assert f"WARNING: port {port} is taken on 127.0.0.1" in err
    assert "WARNING: --model some/model is not in the cache of the hub" in err
    assert "WARNING: no --model" in shim("supervisord", "--", *server)[2]
    assert "WARNING: MLX_SHIM is off" in shim("supervisord", "--env", "MLX_SHIM=0", "--", *server)[2]


@pytest.fixture
def limits(shim, monkeypatch):
    """What a plist of a machine of 64 GiB says: (soft, hard, stderr)."""
    monkeypatch.setattr(memory, "total", lambda: 64 * GIB)

    def made(*command, env=()):
        options = [word for pair in env for word in ("--env", pair)]
        status, out, err = shim("launchd", *options, "--", PYTHON, "-m", "mlx_lm", "server", *command)
        assert status == 0, err
        held = plistlib.loads(out.encode())["EnvironmentVariables"]
        return held.get(SOFT), held.get(HARD), err

    return made


def test_limits_on_memory_in_the_plist(shim, limits, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # this shell's, which the unit does not have
    folder = weightless(tmp_path / "model", 20 * GIB)
    repo = weightless(tmp_path / "hub" / "models--some--draft" / "snapshots" / "abc", 4 * GIB)
    large = weightless(tmp_path / "large", 60 * GIB)
    (repo.parents[1] / "refs").mkdir()
    (repo.parents[1] / "refs" / "main").write_text("abc")
    cut = weightless(tmp_path / "cut", GIB)
    (cut / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")

    soft, hard, err = limits("--model", folder)
    assert (soft, hard) == ("47513M", "54272M")
    assert f"{SOFT}=47513M, {HARD}=54272M: from a model of 20.00 GiB and this machine's 64.00 GiB" in err
    assert f"Off with --env {SOFT}=0 --env {HARD}=0" in err
    draft = ("--model", folder, "--draft-model", "some/draft")
    assert limits(*draft, env=[f"HF_HOME={tmp_path}"])[:2] == ("49152M", "55296M"), "both"
    assert limits(*draft)[:2] == ("70%", "80%"), "one of them is not here"
    for command in ((), ("--model", "some/other"), ("--model", cut)):
        soft, hard, err = limits(*command)
        assert (soft, hard) == ("70%", "80%"), command
        assert "shares of the machine's memory" in err
    soft, hard, err = limits("--model", large)
    assert (soft, hard) == (None, None)
    assert f"no {SOFT} and no {HARD}: the model has 60.00 GiB, which leaves too little" in err
    soft, hard, err = limits("--model", folder, env=[f"{SOFT}=0"])
    assert (soft, hard) == ("0", "54272M")
    assert f"Off with --env {HARD}=0 " in err
    monkeypatch.setenv(SOFT, "0")
    monkeypatch.setenv(HARD, "0")
    soft, hard, err = limits("--model", folder)
    assert (soft, hard, "MEMORY" in err) == ("0", "0", False)
    monkeypatch.delenv(SOFT)
    monkeypatch.delenv(HARD)
    for kind in ("systemd", "supervisord"):
        status, out, err = shim(kind, "--", PYTHON, "-m", "mlx_lm", "server", "--model", folder)
        assert (status, "MEMORY" in out + err) == (0, False)


def test_a_limit_that_is_given_and_the_other_in_the_plist(limits, tmp_path):
    """Soft stays below hard, whichever of them is computed."""
    folder = weightless(tmp_path / "model", 20 * GIB)
    soft, hard, err = limits("--model", folder, env=[f"{HARD}=50000M"])
    assert (soft, hard) == ("45000M", "50000M")
    assert f"this machine's 64.00 GiB, held to 90% of the {HARD}=50000M that is given" in err
    assert limits(env=[f"{HARD}=50%"])[:2] == ("29491M", "50%"), "nor does a share exceed it"
    assert limits("--model", folder, env=[f"{HARD}=56G"])[:2] == ("47513M", "56G"), "it leaves room enough"
    soft, hard, err = limits("--model", folder, env=[f"{SOFT}=54272M"])
    assert (soft, hard) == ("54272M", None)
    assert f"no {HARD}: 54272M, which it would be, is not above the {SOFT}=54272M given" in err
    assert limits("--model", folder, env=[f"{SOFT}=53G"])[:2] == ("53G", None)
    assert limits("--model", folder, env=[f"{SOFT}=52G"])[:2] == ("52G", "54272M")
    soft, hard, err = limits("--model", folder, env=[f"{HARD}=lots"])
    assert (soft, hard, f"{HARD}='lots' is not valid" in err) == ("47513M", "lots", True)


def test_a_model_in_the_cache_is_no_warning(shim, tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", "some/model")
    assert "not in the cache" not in shim("supervisord", "--env", f"HF_HOME={tmp_path}", "--", *command)[2]
