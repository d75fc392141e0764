"""Arguments, variables and paths of a unit come out unchanged when the format's parser reads it."""

from __future__ import annotations

import os
import plistlib
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervisor.options import ServerOptions

from kit.harness import need
from shim.units import Refused, launchd, server, supervisord, systemd
from shim.units.plan import Unit
from shim.units.systemd_syntax import words

_NASTY = st.sampled_from(
    [
        " ",
        "'",
        '"',
        "%",
        "%%",
        "$",
        "$$",
        "\\",
        ";",
        "#",
        " ;",
        " #",
        "%h",
        "${A}",
        "%(x)s",
        "=",
        ",",
        "é",
        "&",
        "<",
        "a",
    ]
)
_PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Z"))
_TEXT = st.lists(_NASTY | _PRINTABLE, max_size=8).map("".join)
_ARGV = st.lists(_TEXT, max_size=6).map(lambda rest: ("/bin/python", *rest))
_ENVIRON = st.dictionaries(
    st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), _TEXT, max_size=4
)
# The filter is that of check_path.
_PATH = _TEXT.map(lambda text: "/" + text.strip().strip("\\/")).filter(
    lambda path: path == path.strip()
)


def unit(argv=("/bin/python",), environ=None, **more):
    return Unit("name", tuple(argv), environ or {}, 31, **more)


@given(_ARGV, _ENVIRON, _PATH)
def test_launchd(argv, environ, log):
    (text,) = launchd.made(unit(argv, environ, log=log)).files.values()
    plist = plistlib.loads(text.encode())
    assert plist["ProgramArguments"] == list(argv)
    assert plist["EnvironmentVariables"] == environ
    assert plist["StandardErrorPath"] == log


@given(_ARGV, _ENVIRON)
def test_systemd_as_check_reads_it(argv, environ):
    (text,) = systemd.made(unit(argv, environ)).files.values()
    lines = text.splitlines()
    (command,) = (
        line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")
    )
    assert tuple(word.replace("$$", "$") for word in words(command)) == argv
    given = [
        words(line.removeprefix("Environment="))
        for line in lines
        if line.startswith("Environment=")
    ]
    assert given == [[f"{name}={value}"] for name, value in sorted(environ.items())]


@settings(max_examples=3, deadline=None)
@given(st.lists(st.tuples(_ARGV, _ENVIRON, _PATH), min_size=20, max_size=30))
def test_systemd_as_systemd_reads_it(tmp_path_factory, units):
    """systemd-analyze shows what it has read. There $ stays doubled, until the service starts."""
    analyze = need("systemd-analyze")
    folder = tmp_path_factory.mktemp("units")
    for number, (argv, environ, log) in enumerate(units):
        (text,) = systemd.made(
            unit(("/bin/true", *argv[1:]), environ, log=log, workdir=log)
        ).files.values()
        (folder / f"local-{number:02}.service").write_text(text)
    shown = subprocess.run(
        [analyze, "verify", "--man=no", *sorted(map(str, folder.iterdir()))],
        capture_output=True,
        check=False,
        env=os.environ | {"SYSTEMD_LOG_LEVEL": "debug"},
    ).stdout.decode()
    parts = shown.split("-> Unit local-")[1:]
    seen = {}
    for part in parts:
        number, _, body = part.partition(".service")
        lines = [line.strip() for line in body.splitlines()]
        seen[int(number)] = (
            [
                unquote(x.removeprefix("Command Line: "))
                for x in lines
                if x.startswith("Command Line: ")
            ],
            sorted(x.removeprefix("Environment: ") for x in lines if x.startswith("Environment: ")),
            [
                x.removeprefix("WorkingDirectory: ")
                for x in lines
                if x.startswith("WorkingDirectory: ")
            ],
        )
    for number, (argv, environ, log) in enumerate(units):
        commands, variables, folders = seen[number]
        assert commands == [["/bin/true", *(word.replace("$", "$$") for word in argv[1:])]]
        assert variables == sorted(f"{name}={value}".strip() for name, value in environ.items())
        assert [os.path.normpath(f) for f in folders] == [os.path.normpath(log)]


def unquote(shown: str) -> list[str]:
    """The words of a command line that systemd shows: unit syntax, but without specifiers."""
    return words(shown.replace("%", "%%"))


@pytest.fixture(scope="module")
def supervisor_reads(tmp_path_factory):
    """Read a configuration with supervisord's own parser. Returns its program."""
    folder = tmp_path_factory.mktemp("supervisor")

    def read(text):
        (folder / "conf").write_text(f"[supervisord]\nlogfile={folder}/log\n" + text)
        options = ServerOptions()
        options.realize(["-c", str(folder / "conf")], doc="")
        (group,) = options.process_group_configs
        return group

    return read


@settings(deadline=None)
@given(_ARGV, _ENVIRON)
def test_supervisord(supervisor_reads, argv, environ):
    taken = {}
    for name, value in environ.items():
        try:
            supervisord.made(unit(environ={name: value}))
        except Refused as why:
            assert "cannot be written for supervisord" in str(why)
            assert set(value) & set("'\";#")
        else:
            taken[name] = value
    (text,) = supervisord.made(unit(argv, taken, workdir="/")).files.values()
    (program,) = supervisor_reads(text).process_configs
    assert shlex.split(program.command) == list(argv)
    assert program.environment == taken
    assert program.stopwaitsecs == 31


def test_supervisord_paths_and_socket(supervisor_reads, tmp_path):
    folder = tmp_path / "100% of; it"
    folder.mkdir()
    made = unit(
        ("/bin/python", "a b"),
        {"A": "1"},
        workdir=str(folder),
        log=f"{folder}/%log",
        socket=True,
        port=9,
    )
    (text,) = supervisord.made(made).files.values()
    group = supervisor_reads(text)
    assert group.socket_config.url == "tcp://127.0.0.1:9"
    assert [p.name for p in group.process_configs] == ["name_0", "name_1"]
    for number, program in enumerate(group.process_configs):
        assert program.directory == str(folder)
        assert program.stdout_logfile == f"{folder}/%log"
        assert shlex.split(program.command)[3:] == [str(number), "/bin/python", "a b"]
        assert program.environment == {"A": "1", "LISTEN_FDS": "1"}


@pytest.mark.parametrize("word", ["%(here)s", "a%(here)sb"])
def test_supervisord_would_replace(word):
    with pytest.raises(Refused, match="it replaces"):
        supervisord.made(unit(("/bin/python", word)))


@pytest.mark.parametrize("text", ["a\nb", "a\x00b", "\x1b[0m", "a\tb", "\u2028", "\udcff"])
def test_what_no_format_can_hold_is_refused(text):
    with pytest.raises(Refused, match="has a newline"):
        server.validate(("/bin/python", text), {}, "/", Path("/"))
