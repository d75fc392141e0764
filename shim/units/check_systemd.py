"""What in a systemd service defeats the shim.

Drop-ins that follow in the same file, as `systemctl cat` prints them, count too.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from ..core import sd_notify
from . import Refused
from .findings import Facts, Findings, common
from .systemd_syntax import Entries, duration, environment, parse, words

_STATUSES = {"70": "a death", "71": "a taken port", "75": "a recycle", "1": "a frozen interpreter"}
_NAMES = {"SOFTWARE": "70", "OSERR": "71", "TEMPFAIL": "75", "CONFIG": "78", "FAILURE": "1"}
_RESTARTS = ("always", "on-failure")
_RESTART_WHY = {
    "no": "nothing restarts a server that exited",
    "on-success": "it restarts only after status 0",
    "on-abnormal": "an exit with a status (70) is not restarted",
    "on-abort": "an exit with a status (70) is not restarted",
    "on-watchdog": "an exit with a status (70) is not restarted",
}
_STOPS = ("SIGTERM", "TERM", "15", "SIGINT", "INT", "2")
# Seconds that a server takes at least to fail.
_LEAST_RUN = 2.0
_TRUE = ("1", "yes", "y", "true", "t", "on")


def check(found: Findings, file: Path, raw: bytes, folder: Path) -> None:
    """Raises Refused where the file is not a service."""
    unit = parse(raw.decode(errors="replace"))
    if not unit.get("Service", "ExecStart"):
        raise Refused(f"{file} is not a systemd service: it has no ExecStart in [Service]")
    _restart(found, unit)
    _limits(found, unit)
    _kind(found, unit)
    _stop(found, unit)
    _surroundings(found, unit)
    for command in unit.all("Service", "ExecStart"):
        common(found, _facts(found, unit, command), folder)


def _facts(found: Findings, unit: Entries, command: str) -> Facts:
    argv = words(command)
    at = unit.at("Service", "ExecStart")
    prefix = re.match(r"[@\-:+!|]*", argv[0])[0] if argv else ""  # type: ignore[index]
    argv[:1] = [argv[0][len(prefix) :]] if argv else []
    if "@" in prefix:
        # With @, the second word is the name that the program gets.
        argv[1:2] = []
    if "-" in prefix and unit.last("Service", "Restart", "no") == "on-failure":
        found.defeats(
            at,
            "- before the program: any status counts as success and is not restarted",
            "it without -",
        )
    if ":" not in prefix:
        argv = [word.replace("$$", "$") if "$$" in word else word for word in argv]
    return Facts(
        argv,
        environment(unit),
        unit.last("Service", "WorkingDirectory", "").lstrip("-"),
        at,
        unit.at("Service", "Environment"),
        "Environment=PYTHONPATH={}",
        unit.at("Service", "TimeoutStopSec"),
        _stop_limit(unit),
        "TimeoutStopSec={}",
    )


def _stop_limit(unit: Entries) -> float | None:
    given = (
        unit.last("Service", "TimeoutStopSec", "") or unit.last("Service", "TimeoutSec", "") or "90"
    )
    return duration(given) or None


def _statuses(unit: Entries, key: str) -> set[str]:
    return {_NAMES.get(word, word) for value in unit.all("Service", key) for word in value.split()}


def _restart(found: Findings, unit: Entries) -> None:
    restart = unit.last("Service", "Restart", "no")
    at = unit.at("Service", "Restart")
    forced = _statuses(unit, "RestartForceExitStatus")
    if restart not in _RESTARTS and not set(_STATUSES) <= forced:
        why = _RESTART_WHY.get(restart, "it is not a value that systemd takes")
        found.defeats(at, f"{restart}: {why}", "Restart=always")
    if restart == "on-failure":
        found.note(at, "after a SIGTERM from elsewhere (status 0) it stays down", "Restart=always")
        _held(found, unit, "SuccessExitStatus", "counts as success and is not restarted")
    _held(found, unit, "RestartPreventExitStatus", "is not restarted")
    if "78" in _statuses(unit, "RestartPreventExitStatus"):
        at = unit.at("Service", "RestartPreventExitStatus")
        found.note(
            at,
            "78: a model that could not be loaded once is not tried again",
            "it without 78, if that is not meant",
        )


def _held(found: Findings, unit: Entries, key: str, what: str) -> None:
    for code in sorted(_statuses(unit, key) & set(_STATUSES)):
        found.defeats(
            unit.at("Service", key), f"{code} ({_STATUSES[code]}) {what}", f"{key} without {code}"
        )


def _limits(found: Findings, unit: Entries) -> None:
    section = (
        "Unit"
        if any(unit.get("Unit", f"StartLimit{x}") for x in ("IntervalSec", "Interval", "Burst"))
        else "Service"
    )
    given = (
        unit.last(section, "StartLimitIntervalSec", "")
        or unit.last(section, "StartLimitInterval", "")
        or "10"
    )
    interval = math.inf if given == "infinity" else duration(given)
    burst = unit.last(section, "StartLimitBurst", "5")
    pause = duration(unit.last("Service", "RestartSec", "100ms"))
    if interval is None or not burst.isdecimal():
        return
    if int(burst) and int(burst) * ((pause or 0) + _LEAST_RUN) <= interval:
        what = f"after {burst} starts within {interval:g} s it stays down"
        found.defeats(
            unit.at(section, "StartLimitBurst"), what, "StartLimitIntervalSec=0 in [Unit]"
        )


def _kind(found: Findings, unit: Entries) -> None:
    kind = unit.last("Service", "Type", "simple")
    at = unit.at("Service", "Type")
    if kind in ("oneshot", "forking", "dbus"):
        found.defeats(
            at,
            f"{kind}: the server never becomes that, so the start times out or never ends",
            "Type=exec",
        )
    if unit.last("Service", "RemainAfterExit", "no").lower() in _TRUE:
        at = unit.at("Service", "RemainAfterExit")
        found.defeats(at, "a server that ended with 0 counts as running", "nothing instead")
    if kind in ("notify", "notify-reload"):
        start = (
            unit.last("Service", "TimeoutStartSec", "")
            or unit.last("Service", "TimeoutSec", "")
            or "90"
        )
        limit = duration(start)
        if limit:
            # The shim asks systemd for more time.
            limit = max(limit, sd_notify.LOADING_LIMIT)
            at = unit.at("Service", "TimeoutStartSec")
            found.note(
                at,
                f"a model that takes longer than {limit:g} s to load is killed",
                "TimeoutStartSec=infinity",
            )


def _stop(found: Findings, unit: Entries) -> None:
    name = unit.last("Service", "KillSignal", "SIGTERM")
    if name not in _STOPS:
        found.defeats(
            unit.at("Service", "KillSignal"),
            f"{name} ends the server at once: no drain",
            "KillSignal=SIGTERM",
        )
    if unit.last("Service", "KillMode", "control-group") == "none":
        found.defeats(
            unit.at("Service", "KillMode"),
            "a server that does not stop is left behind",
            "KillMode=mixed",
        )


def _surroundings(found: Findings, unit: Entries) -> None:
    if not (unit.get("Install", "WantedBy") or unit.get("Install", "RequiredBy")):
        found.note(
            unit.at("Install", "WantedBy"),
            "it is not started at boot",
            "WantedBy=multi-user.target",
        )
    for key, slow in (("CPUSchedulingPolicy", "idle"), ("IOSchedulingClass", "idle")):
        if unit.last("Service", key, "") == slow:
            found.defeats(
                unit.at("Service", key),
                "every other program comes first, which looks like a stall",
                "nothing instead",
            )
    nice = unit.last("Service", "Nice", "0")
    if nice.isdecimal() and int(nice) > 0:
        found.note(
            unit.at("Service", "Nice"),
            "other programs come first, which may look like a stall",
            "nothing instead",
        )
    home = unit.last("Service", "ProtectHome", "no").lower()
    text = " ".join((*unit.all("Service", "ExecStart"), environment(unit).get("PYTHONPATH", "")))
    if home in (*_TRUE, "tmpfs") and re.search(r"(^|[\s:\"=])/(home|root)/", text):
        found.defeats(
            unit.at("Service", "ProtectHome"),
            "the server cannot read what lies in a home",
            "ProtectHome=read-only",
        )
