"""What in a launchd property list defeats the shim."""

from __future__ import annotations

import difflib
import plistlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import Refused
from .environ import LAUNCHD_SOCKET
from .findings import Facts, Findings, common
from .launchd_keys import KEYS, WITHIN, is_a

# Seconds that launchd waits before SIGKILL without ExitTimeOut, as seen today.
_DEFAULT_EXIT_LIMIT = 5
_NO_EXIT_LIMIT = (
    f"SIGKILL after {_DEFAULT_EXIT_LIMIT} s as launchd is today, after 20 s by older manuals"
)
_TRUE = "<key>KeepAlive</key><true/>"
_LONG_PAUSE = 60  # seconds
_ENOUGH_FILES = 1024
_SYSTEM = "/Library/LaunchDaemons"


def check(found: Findings, file: Path, raw: bytes, folder: Path) -> None:
    """Raises Refused where the file is not a property list of a launchd job."""
    try:
        plist = plistlib.loads(raw)
    # plistlib raises whatever expat, struct or its own code raises.
    except Exception as error:
        raise Refused(f"{file} is not a property list: {error}") from None
    if not isinstance(plist, dict) or not ({"ProgramArguments", "Program"} & set(plist)):
        raise Refused(f"{file} is not a property list of a launchd job: it has no ProgramArguments")
    _types(found, plist)
    plist = {
        key: value for key, value in plist.items() if key not in KEYS or is_a(value, KEYS[key])
    }
    if "Label" not in plist:
        found.defeats(
            "Label",
            "it is missing: launchd loads nothing",
            "<key>Label</key><string>local.mlx-lm</string>",
        )
    _permissions(found, file)
    _keep_alive(found, plist)
    _when(found, plist)
    _priority(found, plist)
    _surroundings(found, plist)
    common(found, _facts(plist), folder)


def _facts(plist: Mapping[str, Any]) -> Facts:
    argv = [str(word) for word in plist.get("ProgramArguments", [])]
    if plist.get("Program"):
        argv = [str(plist["Program"]), *argv[1:]]
    limit = plist.get("ExitTimeOut", _DEFAULT_EXIT_LIMIT)
    missing = "" if "ExitTimeOut" in plist else _NO_EXIT_LIMIT
    return Facts(
        argv,
        {k: v for k, v in plist.get("EnvironmentVariables", {}).items() if isinstance(v, str)},
        plist.get("WorkingDirectory", ""),
        "ProgramArguments",
        "EnvironmentVariables",
        "<key>PYTHONPATH</key><string>{}</string>",
        "ExitTimeOut",
        float(limit) if limit else None,
        "<key>ExitTimeOut</key><integer>{}</integer>",
        missing,
    )


def _types(found: Findings, plist: Mapping[str, Any]) -> None:
    for key, value in plist.items():
        _one(found, "", key, value, KEYS)
        tables = _entries(value) if key == "Sockets" else [value]
        for table in tables if key in WITHIN else ():
            for inner, what in table.items() if isinstance(table, dict) else ():
                _one(found, f"{key} ", inner, what, WITHIN[key])


def _entries(sockets: object) -> list[object]:
    """The dictionaries under the names in Sockets. A name may have an array of them."""
    values = list(sockets.values()) if isinstance(sockets, dict) else []
    return [entry for value in values for entry in (value if isinstance(value, list) else [value])]


def _one(found: Findings, at: str, key: str, value: object, known: Mapping[str, str]) -> None:
    where = f"{at}{key}"
    if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        found.note(
            where,
            "launchd knows no such key and ignores it",
            near[0] if near else "nothing instead",
        )
    elif not is_a(value, known[key]):
        what = f"it is of the type {type(value).__name__}, which launchd ignores here"
        if where == "KeepAlive":
            found.defeats(where, what, _TRUE)
        else:
            found.note(where, what, f"a {known[key]}")


def _permissions(found: Findings, file: Path) -> None:
    status = file.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        found.defeats(
            "the file", "others may write it, so launchd does not load it", f"chmod 644 {file}"
        )
    if str(file.resolve().parent) == _SYSTEM and status.st_uid != 0:
        found.defeats(
            "the file",
            "root does not own it, so launchd does not load it",
            f"chown root:wheel {file}",
        )


def _keep_alive(found: Findings, plist: Mapping[str, Any]) -> None:
    keep = plist.get("KeepAlive", False)
    if plist.get("OnDemand") is False and "KeepAlive" not in plist:
        found.note("OnDemand", "false is the old name of KeepAlive true", _TRUE)
        return
    if not keep:
        found.defeats(
            "KeepAlive",
            "it is missing, false or empty: nothing restarts a server that exited",
            _TRUE,
        )
    if not isinstance(keep, dict) or not keep:
        return
    on_status = keep.get("SuccessfulExit") is False or keep.get("Crashed") is False
    on_crash = keep.get("SuccessfulExit") is False or keep.get("Crashed") is True
    tell = found.note if on_status and on_crash else found.defeats
    for key, value in keep.items():
        what = _condition(key, value)
        if what:
            tell(f"KeepAlive {key}", what, _TRUE)
    if on_status and on_crash:
        found.note("KeepAlive", "after a SIGTERM from elsewhere (status 0) it stays down", _TRUE)


def _condition(key: str, value: object) -> str:
    """Say what a condition of KeepAlive does to a server that exits 70."""
    told = {
        (
            "SuccessfulExit",
            True,
        ): "it restarts only after status 0, which the shim never gives for a fault",
        (
            "Crashed",
            True,
        ): "an exit with a status (70, 71, 75) is not a crash to launchd, and is not restarted",
        ("Crashed", False): "a crash in native code is not restarted",
        ("NetworkState", True): "launchd does nothing with it any more",
        ("NetworkState", False): "launchd does nothing with it any more",
    }
    if key == "PathState":
        return "whether it is restarted depends on a file being there"
    if key == "OtherJobEnabled":
        return "whether it is restarted depends on another job"
    return told.get((key, value), "") if isinstance(value, bool) else ""


def _when(found: Findings, plist: Mapping[str, Any]) -> None:
    if plist.get("LaunchOnlyOnce"):
        found.defeats("LaunchOnlyOnce", "it is started once and never again", "nothing instead")
    if plist.get("EnableTransactions"):
        what = (
            "launchd stops a job without XPC transactions, such as this one, by SIGKILL at once:"
            " nothing is drained"
        )
        found.defeats("EnableTransactions", what, "nothing instead")
    if plist.get("Disabled"):
        found.defeats("Disabled", "launchd does not load it", "nothing instead")
    for key in (
        "StartInterval",
        "StartCalendarInterval",
        "WatchPaths",
        "QueueDirectories",
        "StartOnMount",
    ):
        if key in plist and not plist.get("KeepAlive"):
            found.defeats(key, "it starts the server at times, not after an exit", _TRUE)
    if plist.get("ThrottleInterval", 0) > _LONG_PAUSE:
        found.note(
            "ThrottleInterval",
            f"after a death it stays down for up to {plist['ThrottleInterval']} s",
            "<key>ThrottleInterval</key><integer>10</integer>",
        )


def _priority(found: Findings, plist: Mapping[str, Any]) -> None:
    if plist.get("ProcessType") == "Background":
        found.defeats(
            "ProcessType",
            "Background throttles CPU and I/O, which looks like a stall and is restarted as one",
            "<key>ProcessType</key><string>Interactive</string>",
        )
    if plist.get("Nice", 0) > 0:
        found.note(
            "Nice", "other programs come first, which may look like a stall", "nothing instead"
        )
    for key in ("LowPriorityIO", "LowPriorityBackgroundIO"):
        if plist.get(key):
            found.note(key, "loading the model waits for every other program", "nothing instead")
    files = plist.get("SoftResourceLimits", {}).get("NumberOfFiles", 256)
    if isinstance(files, int) and files < _ENOUGH_FILES:
        found.note(
            "SoftResourceLimits", f"{files} open files are soon too few", "NumberOfFiles 4096"
        )


def _surroundings(found: Findings, plist: Mapping[str, Any]) -> None:
    sockets = plist.get("Sockets", {})
    named = plist.get("EnvironmentVariables", {}).get(LAUNCHD_SOCKET, "")
    if sockets and named not in sockets:
        what = (
            "launchd holds the port and the server does not take the socket over:"
            f" {LAUNCHD_SOCKET} names none of them; exit 71"
        )
        found.defeats(
            "Sockets", what, f"{LAUNCHD_SOCKET}={next(iter(sockets))} into EnvironmentVariables"
        )
    if named and not sockets:
        found.defeats(
            "EnvironmentVariables",
            f"{LAUNCHD_SOCKET} names no entry of Sockets",
            "Sockets, or nothing instead",
        )
    for name, value in plist.get("EnvironmentVariables", {}).items():
        if not isinstance(value, str):
            found.note(
                "EnvironmentVariables",
                f"{name} is not a string, and launchd ignores it",
                "a string",
            )
    for key in ("StandardOutPath", "StandardErrorPath"):
        path = plist.get(key, "")
        if path and not path.startswith("/"):
            found.defeats(
                key,
                f"{path!r} is not an absolute path, and launchd replaces no ~",
                "the absolute path",
            )
    if not plist.get("StandardErrorPath"):
        found.note(
            "StandardErrorPath",
            "it is missing: the lines that the shim writes are lost",
            "a file in ~/Library/Logs",
        )
    if plist.get("WorkingDirectory", "/")[:1] != "/":
        found.defeats("WorkingDirectory", "it is not an absolute path", "the absolute path")
