"""--check FILE: what in a user's own unit defeats the shim."""

from __future__ import annotations

import plistlib
from pathlib import Path
from textwrap import indent

import pytest

from kit.harness import NEWEST, REPO, python_of
from shim.units import Refused, check
from shim.units.systemd_syntax import duration

PYTHON = python_of(NEWEST)
SERVER = (PYTHON, "-m", "mlx_lm", "server", "--model", "some/model")
COMMAND = " ".join(SERVER)
GOOD_PLIST = {
    "Label": "x",
    "ProgramArguments": list(SERVER),
    "EnvironmentVariables": {"PYTHONPATH": str(REPO)},
    "KeepAlive": True,
    "ExitTimeOut": 40,
    "StandardErrorPath": "/tmp/log",
    "SoftResourceLimits": {"NumberOfFiles": 4096},
}
GOOD_SERVICE = f"""\
[Unit]
StartLimitIntervalSec=0
[Service]
Environment=PYTHONPATH={REPO}
ExecStart={COMMAND}
Restart=always
[Install]
WantedBy=default.target
"""
GOOD_PROGRAM = f"""\
[program:mlx]
command={COMMAND}
environment=PYTHONPATH="{REPO}"
autorestart=true
stopwaitsecs=40
"""


@pytest.fixture
def lines(tmp_path):
    """What --check says of a text, a dictionary (as a plist) or bytes."""

    def look(kind, what):
        file = tmp_path / "unit"
        file.write_bytes(
            what
            if isinstance(what, bytes)
            else what.encode()
            if isinstance(what, str)
            else plistlib.dumps(what)
        )
        file.chmod(0o644)
        return [str(f).removeprefix(f"{file}: ") for f in check.findings(kind, file, REPO)]

    return look


def plist(**changes):
    """The good plist with changes. None removes a key."""
    return {key: value for key, value in (GOOD_PLIST | changes).items() if value is not None}


def variables(**more):
    return {"EnvironmentVariables": {"PYTHONPATH": str(REPO)} | more}


def test_what_is_good(lines):
    assert lines("launchd", GOOD_PLIST) == []
    assert lines("launchd", plistlib.dumps(GOOD_PLIST, fmt=plistlib.FMT_BINARY)) == []
    assert lines("systemd", GOOD_SERVICE) == []
    assert lines("supervisord", GOOD_PROGRAM) == []


PLISTS = [
    (plist(KeepAlive=None), "DEFEATS: KeepAlive: it is missing"),
    (plist(KeepAlive=False), "DEFEATS: KeepAlive: it is missing, false"),
    (plist(KeepAlive="true"), "DEFEATS: KeepAlive: it is of the type str, which launchd ignores"),
    (
        plist(KeepAlive={"Crashed": True}),
        "DEFEATS: KeepAlive Crashed: an exit with a status (70, 71, 75) is not a crash",
    ),
    (
        plist(KeepAlive={"Crashed": False}),
        "DEFEATS: KeepAlive Crashed: a crash in native code is not restarted",
    ),
    (
        plist(KeepAlive={"SuccessfulExit": True}),
        "DEFEATS: KeepAlive SuccessfulExit: it restarts only after status 0",
    ),
    (plist(KeepAlive={"SuccessfulExit": False}), "note: KeepAlive: after a SIGTERM from elsewhere"),
    (
        plist(KeepAlive={"PathState": {"/x": True}}),
        "DEFEATS: KeepAlive PathState: whether it is restarted",
    ),
    (
        plist(KeepAlive={"NetworkState": True}),
        "DEFEATS: KeepAlive NetworkState: launchd does nothing with it",
    ),
    (plist(KeepAlive={"OtherJobEnabled": {"y": True}}), "DEFEATS: KeepAlive OtherJobEnabled"),
    (
        plist(KeepAlive=None, StartInterval=60),
        "DEFEATS: StartInterval: it starts the server at times",
    ),
    (plist(KeepAlive=None, StartCalendarInterval={"Hour": 1}), "DEFEATS: StartCalendarInterval"),
    (plist(LaunchOnlyOnce=True), "DEFEATS: LaunchOnlyOnce"),
    (plist(Disabled=True), "DEFEATS: Disabled"),
    (plist(EnableTransactions=True), "DEFEATS: EnableTransactions: launchd stops a job without"),
    (plist(**variables(MLX_SHIM=0)), "note: EnvironmentVariables: MLX_SHIM is not a string"),
    (plist(ProcessType="Background"), "DEFEATS: ProcessType: Background throttles"),
    (plist(Nice=10), "note: Nice"),
    (plist(LowPriorityIO=True), "note: LowPriorityIO"),
    (plist(ThrottleInterval=600), "note: ThrottleInterval"),
    (
        plist(ExitTimeOut=None),
        "DEFEATS: ExitTimeOut: it is missing: SIGKILL after 5 s as launchd is today",
    ),
    (
        plist(ExitTimeOut=None, **variables(MLX_SHIM_DRAIN="2s")),
        "DEFEATS: ExitTimeOut: it is missing",
    ),
    (
        plist(ExitTimeOut=10),
        "DEFEATS: ExitTimeOut: SIGKILL after 10 s, and the drain takes up to 26 s",
    ),
    (plist(ExitTimeOut=0), "note: ExitTimeOut: it waits without limit"),
    (
        plist(**variables(MLX_SHIM_DRAIN="60s")),
        "DEFEATS: ExitTimeOut: SIGKILL after 40 s, and the drain takes up to 61 s",
    ),
    (
        plist(KeepALive=True),
        "note: KeepALive: launchd knows no such key and ignores it; write KeepAlive",
    ),
    (plist(Nice="5"), "note: Nice: it is of the type str"),
    (
        plist(Sockets={"L": {"SockServiceName": "1"}}),
        "DEFEATS: Sockets: launchd holds the port and the server does not",
    ),
    (
        plist(**variables(MLX_SHIM_LAUNCHD_SOCKET="L")),
        "DEFEATS: EnvironmentVariables: MLX_SHIM_LAUNCHD_SOCKET names no",
    ),
    (
        plist(StandardErrorPath="~/log"),
        "DEFEATS: StandardErrorPath: '~/log' is not an absolute path",
    ),
    (plist(StandardErrorPath=None), "note: StandardErrorPath: it is missing"),
    (plist(Label=None), "DEFEATS: Label"),
    (plist(SoftResourceLimits=None), "note: SoftResourceLimits: 256 open files"),
    (
        plist(EnvironmentVariables=None),
        "DEFEATS: EnvironmentVariables: PYTHONPATH is missing: the server runs as stock; write",
    ),
    (
        plist(EnvironmentVariables={"PYTHONPATH": "/no"}),
        "DEFEATS: EnvironmentVariables: PYTHONPATH='/no' holds no folder",
    ),
    (
        plist(EnvironmentVariables={"PYTHONPATH": "~/shim"}),
        "DEFEATS: EnvironmentVariables: PYTHONPATH has '~/shim'",
    ),
    (plist(**variables(MLX_SHIM="0")), "DEFEATS: EnvironmentVariables: MLX_SHIM is off"),
    (
        plist(**variables(MLX_SHIM_GENERATION_DEATH="0")),
        "DEFEATS: EnvironmentVariables: MLX_SHIM_GENERATION_DEATH is off",
    ),
    (
        plist(**variables(MLX_SHIM_ON_STALL="dump")),
        "note: EnvironmentVariables: MLX_SHIM_ON_STALL=dump",
    ),
    (
        plist(**variables(MLX_SHIM_STRICKT="1")),
        "note: EnvironmentVariables: MLX_SHIM_STRICKT is not a setting",
    ),
    (
        plist(**variables(HF_TOKEN="x")),
        "DEFEATS: EnvironmentVariables: HF_TOKEN: its name says it holds a secret",
    ),
    (
        plist(ProgramArguments=[PYTHON, "-I", *SERVER[1:]]),
        "DEFEATS: ProgramArguments: -I isolates Python",
    ),
    (
        plist(ProgramArguments=[PYTHON, "-uE", *SERVER[1:]]),
        "DEFEATS: ProgramArguments: -E makes Python ignore",
    ),
    (
        plist(ProgramArguments=["python3", *SERVER[1:]]),
        "DEFEATS: ProgramArguments: 'python3' is not an absolute path",
    ),
    (
        plist(ProgramArguments=["~/v/bin/python", *SERVER[1:]]),
        "DEFEATS: ProgramArguments: '~/v/bin/python': no shell",
    ),
    (
        plist(ProgramArguments=["/no/python", *SERVER[1:]]),
        "DEFEATS: ProgramArguments: '/no/python' does not exist here",
    ),
    (
        plist(ProgramArguments=[*SERVER[:-1], "./m"]),
        "DEFEATS: ProgramArguments: --model './m' is not an absolute path",
    ),
    (
        plist(ProgramArguments=[*SERVER[:-1], "/no/m"]),
        "DEFEATS: ProgramArguments: --model '/no/m' does not exist here",
    ),
    (plist(ProgramArguments=["/bin/ls"]), "note: ProgramArguments: what it runs cannot be told"),
    (
        plist(ProgramArguments=["/usr/bin/nohup", *SERVER]),
        "note: ProgramArguments: nohup does nothing",
    ),
    (
        plist(ProgramArguments=["/usr/bin/setsid", *SERVER]),
        "DEFEATS: ProgramArguments: setsid may start",
    ),
    (
        plist(ProgramArguments=["/usr/sbin/taskpolicy", "-b", *SERVER]),
        "DEFEATS: ProgramArguments: taskpolicy -b throttles",
    ),
]


@pytest.mark.parametrize(("given", "says"), PLISTS)
def test_a_plist(lines, given, says):
    said = lines("launchd", given)
    assert [line for line in said if line.startswith(says)], said
    if says.startswith("note"):
        assert not [line for line in said if line.startswith("DEFEATS")]
    assert all("; write " in line and "\n" not in line for line in said)


@pytest.mark.parametrize(
    "prefix",
    [
        ("/usr/bin/env",),
        ("/usr/bin/caffeinate", "-i", "-t", "9"),
        ("/usr/bin/nice", "-n", "5"),
        ("arch", "-arm64"),
    ],
)
def test_programs_that_become_the_server(lines, prefix):
    assert lines("launchd", plist(ProgramArguments=[*prefix, *SERVER])) == []


def test_env_sets_what_counts(lines):
    command = ["/usr/bin/env", f"PYTHONPATH={REPO}", *SERVER]
    assert lines("launchd", plist(ProgramArguments=command, EnvironmentVariables=None)) == []


def test_our_own_run_needs_no_pythonpath(lines):
    command = [PYTHON, "-m", "shim", "run", "--model", "some/model"]
    assert lines("launchd", plist(ProgramArguments=command, EnvironmentVariables=None)) == []


def test_a_sitecustomize_before_ours(lines, tmp_path):
    (tmp_path / "sitecustomize.py").touch()
    said = lines("launchd", plist(EnvironmentVariables={"PYTHONPATH": f"{tmp_path}:{REPO}"}))
    assert "sitecustomize.py comes first, and is not the shim's" in said[0]


def test_a_console_script_whose_first_line_keeps_the_shim_out(lines, tmp_path):
    script = tmp_path / "mlx_lm.server"
    script.write_text(f"#!{PYTHON} -sE\n")
    assert lines("launchd", plist(ProgramArguments=[str(script)]))[0].startswith(
        "DEFEATS: ProgramArguments: -E makes"
    )


def test_a_plist_that_others_may_write(tmp_path):
    file = tmp_path / "x.plist"
    file.write_bytes(plistlib.dumps(GOOD_PLIST))
    file.chmod(0o664)
    (finding,) = check.findings("launchd", file, REPO)
    assert "others may write it, so launchd does not load it; write chmod 644" in str(finding)


def service(old="", new=""):
    """The good service with a line replaced. Without an old line, one is added to [Service]."""
    return GOOD_SERVICE.replace(old or "[Service]\n", new + "\n" if old else f"[Service]\n{new}\n")


SERVICES = [
    (
        service("Restart=always\n", ""),
        "DEFEATS: [Service] Restart, which is missing: no: nothing restarts",
    ),
    *(
        (service("Restart=always\n", f"Restart={x}"), f"DEFEATS: line 6: [Service] Restart: {x}: ")
        for x in ("no", "on-success", "on-abnormal", "on-abort", "on-watchdog", "maybe")
    ),
    (
        service("Restart=always\n", "Restart=on-failure"),
        "note: line 6: [Service] Restart: after a SIGTERM",
    ),
    (
        service("Restart=always\n", "Restart=on-failure\nSuccessExitStatus=SOFTWARE 3"),
        "DEFEATS: line 7: [Service] SuccessExitStatus: 70",
    ),
    (
        service("", "RestartPreventExitStatus=70 75"),
        "DEFEATS: line 4: [Service] RestartPreventExitStatus: 70 (a death)",
    ),
    (
        service("", "RestartPreventExitStatus=78"),
        "note: line 4: [Service] RestartPreventExitStatus: 78",
    ),
    (
        service("StartLimitIntervalSec=0\n", "StartLimitIntervalSec=600\nStartLimitBurst=5"),
        "DEFEATS: line 3: [Unit] StartLimitBurst: after 5 starts within 600 s",
    ),
    (
        service("StartLimitIntervalSec=0\n", "StartLimitIntervalSec=infinity"),
        "DEFEATS: [Unit] StartLimitBurst, which is missing",
    ),
    (
        service("StartLimitIntervalSec=0\n", "StartLimitBurst=2"),
        "DEFEATS: line 2: [Unit] StartLimitBurst: after 2",
    ),
    (service("", "Type=oneshot"), "DEFEATS: line 4: [Service] Type: oneshot"),
    (service("", "Type=forking"), "DEFEATS: line 4: [Service] Type: forking"),
    (
        service("", "Type=notify"),
        "note: [Service] TimeoutStartSec, which is missing: a model that takes longer",
    ),
    (service("", "RemainAfterExit=yes"), "DEFEATS: line 4: [Service] RemainAfterExit"),
    (
        service("", "TimeoutStopSec=10"),
        "DEFEATS: line 4: [Service] TimeoutStopSec: SIGKILL after 10 s",
    ),
    (
        service("", "TimeoutSec=1"),
        "DEFEATS: [Service] TimeoutStopSec, which is missing: SIGKILL after 1 s",
    ),
    (
        service("", "TimeoutStopSec=infinity"),
        "note: line 4: [Service] TimeoutStopSec: it waits without limit",
    ),
    (
        service("", "Environment=MLX_SHIM_DRAIN=2m"),
        "DEFEATS: [Service] TimeoutStopSec, which is missing: SIGKILL after 90 s",
    ),
    (
        service("", "KillSignal=SIGKILL"),
        "DEFEATS: line 4: [Service] KillSignal: SIGKILL ends the server at once",
    ),
    (service("", "KillMode=none"), "DEFEATS: line 4: [Service] KillMode"),
    (service("", "IOSchedulingClass=idle"), "DEFEATS: line 4: [Service] IOSchedulingClass"),
    (service("", "Nice=5"), "note: line 4: [Service] Nice"),
    (
        service("", "Environment=HF_TOKEN=x"),
        "DEFEATS: line 5: [Service] Environment: HF_TOKEN: its name",
    ),
    (
        service("", 'Environment="A=b c" MLX_SHIM=0'),
        "DEFEATS: line 5: [Service] Environment: MLX_SHIM is off",
    ),
    (
        service(f"Environment=PYTHONPATH={REPO}\n", ""),
        "DEFEATS: [Service] Environment, which is missing: PYTHONPATH",
    ),
    (
        service(f"ExecStart={PYTHON}", f"ExecStart={PYTHON} -I \\"),
        "DEFEATS: line 5: [Service] ExecStart: -I isolates",
    ),
    (service("WantedBy=default.target\n", ""), "note: [Install] WantedBy, which is missing"),
    (GOOD_SERVICE + "[Service]\nRestart=no\n", "DEFEATS: line 10: [Service] Restart: no"),
    (
        GOOD_SERVICE + "[Service]\nExecStart=\nExecStart=/bin/sh -c '" + COMMAND + " | cat'\n",
        "DEFEATS: line 11: [Service] ExecStart: the status of a pipe",
    ),
    (
        service("Restart=always\n", "Restart=on-failure").replace("ExecStart=", "ExecStart=-"),
        "DEFEATS: line 5: [Service] ExecStart: - before",
    ),
]


@pytest.mark.parametrize(("given", "says"), SERVICES)
def test_a_service(lines, given, says):
    said = lines("systemd", given)
    assert [line for line in said if line.startswith(says)], said
    if says.startswith("note"):
        assert not [line for line in said if line.startswith("DEFEATS")], said


def test_services_that_are_good_in_other_words(lines, tmp_path):
    environ = tmp_path / "environ"
    environ.write_text(f'# ours\nPYTHONPATH="{REPO}"\nHF_TOKEN=in-a-file-of-its-own\n')
    for text in (
        service(f"Environment=PYTHONPATH={REPO}\n", f"EnvironmentFile=-{environ}"),
        service(f"Environment=PYTHONPATH={REPO}\n", f'Environment=A=1 "PYTHONPATH={REPO}"'),
        service("Restart=always\n", "Restart=no\nRestartForceExitStatus=1 70 71 75 78"),
        service(f"ExecStart={PYTHON}", f"ExecStart=:{PYTHON} \\\n# a comment in between"),
        GOOD_SERVICE.replace(f"ExecStart={PYTHON}", f'ExecStart=@"{PYTHON}" mlx'),
        GOOD_SERVICE.replace("Restart=always", "Restart=no") + "[Service]\nRestart=always\n",
    ):
        assert lines("systemd", text) == [], text


def program(old="", new=""):
    return (
        GOOD_PROGRAM.replace(old, new + "\n" if new else "") if old else GOOD_PROGRAM + new + "\n"
    )


PROGRAMS = [
    (
        program("autorestart=true\n", "autorestart=false"),
        "DEFEATS: line 4: [program:mlx] autorestart: false",
    ),
    (
        program("autorestart=true\n", "autorestart=unexpected"),
        "note: line 4: [program:mlx] autorestart: after a SIGTERM",
    ),
    (
        program("autorestart=true\n", "exitcodes=0,70"),
        "DEFEATS: line 4: [program:mlx] exitcodes: 70 (a death)",
    ),
    (
        program("stopwaitsecs=40\n"),
        "DEFEATS: [program:mlx] stopwaitsecs, which is missing: SIGKILL after 10 s",
    ),
    (
        " " + program("autorestart=true\n", "autorestart=false"),
        "DEFEATS: line 4: [program:mlx] autorestart: false",
    ),
    (
        indent(program("autorestart=true\n", "autorestart=false"), "\t"),
        "DEFEATS: line 4: [program:mlx] autorestart: false",
    ),
    (
        program("", "stopsignal=KILL"),
        "DEFEATS: line 6: [program:mlx] stopsignal: KILL ends the server at once",
    ),
    (
        program("", "startsecs=60"),
        "DEFEATS: [program:mlx] startretries, which is missing: after 3 starts",
    ),
    (program("", "autostart=false"), "note: line 6: [program:mlx] autostart"),
    (
        program("", "numprocs=2\nprocess_name=%(process_num)s"),
        "DEFEATS: line 6: [program:mlx] numprocs",
    ),
    (
        program(f'environment=PYTHONPATH="{REPO}"\n'),
        "DEFEATS: [program:mlx] environment, which is missing: PYTHONPATH is missing",
    ),
    (
        program("", f'environment=PYTHONPATH="{REPO}",MLX_SHIM=0'),
        "DEFEATS: line 3: [program:mlx] environment: MLX_SHIM is off",
    ),
    (
        program(COMMAND, f"/bin/sh -c '{COMMAND}; true'"),
        "DEFEATS: line 2: [program:mlx] command: the shell's status",
    ),
    (
        program(COMMAND, f"{PYTHON} -E -m mlx_lm server"),
        "DEFEATS: line 2: [program:mlx] command: -E makes",
    ),
    (
        program(COMMAND, "venv/bin/python -m mlx_lm server"),
        "DEFEATS: line 2: [program:mlx] command: 'venv/bin/python' is not",
    ),
]


@pytest.mark.parametrize(("given", "says"), PROGRAMS)
def test_a_program(lines, given, says):
    said = lines("supervisord", given)
    assert [line for line in said if line.startswith(says)], said
    if says.startswith("note"):
        assert not [line for line in said if line.startswith("DEFEATS")], said


def test_programs_that_are_good_in_other_words(lines, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIM_IS_IN", str(REPO))
    pair = f'environment=PYTHONPATH="{REPO}"\n'
    for text in (
        program(pair, 'environment=A="b,c",PYTHONPATH="%(ENV_SHIM_IS_IN)s" ; where it is'),
        f"[supervisord]\n{pair}\n[program:other]\ncommand=/bin/cat\nautorestart=false\n\n"
        + program(pair),
    ):
        assert lines("supervisord", text) == [], text


@pytest.mark.parametrize("kind", ["launchd", "systemd", "supervisord"])
def test_what_is_of_another_kind(lines, kind, tmp_path):
    for text in (
        "",
        "hello\n",
        "[Unit]\nDescription=x\n",
        "[supervisord]\n",
        b"\0\1",
        plistlib.dumps({"a": 1}),
        b"x" * 10**6,
    ):
        with pytest.raises(Refused, match="is not a "):
            lines(kind, text)
    with pytest.raises(Refused, match="cannot be read"):
        check.findings(kind, Path(tmp_path), REPO)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1min 30s", 90),
        ("2h", 7200),
        ("500ms", 0.5),
        ("infinity", None),
        ("1 fortnight", None),
    ],
)
def test_time_spans_of_systemd(text, seconds):
    assert duration(text) == seconds
