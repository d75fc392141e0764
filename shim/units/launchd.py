"""Makes a launchd property list, with advice. The keys are those of docs/launchd.md."""

from __future__ import annotations

import plistlib
import shlex
from typing import Any

from .environ import LAUNCHD_SOCKET
from .plan import OPEN_FILES, Made, Unit, address

SOCKET = "Listener"


def made(unit: Unit) -> Made:
    """The property list, the same for the same unit. Raises Refused."""
    environ = dict(unit.environ)
    plist: dict[str, Any] = {
        "Label": unit.name,
        "ProgramArguments": list(unit.argv),
        "EnvironmentVariables": environ,
        "WorkingDirectory": unit.workdir,
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 10,
        "ExitTimeOut": unit.stop_limit,
        "ProcessType": "Interactive",
        "StandardOutPath": unit.log,
        "StandardErrorPath": unit.log,
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
    }
    if unit.user:
        plist["UserName"] = unit.user
    if unit.socket:
        plist["Sockets"] = {
            SOCKET: {"SockNodeName": address(unit), "SockServiceName": str(unit.port)}
        }
        environ[LAUNCHD_SOCKET] = SOCKET
    text = plistlib.dumps(plist, sort_keys=True).decode()
    return Made({f"{unit.name}.plist": text}, _advice(unit))


def _advice(unit: Unit) -> list[str]:
    if unit.user:
        domain, sudo, path = "system", "sudo ", f"/Library/LaunchDaemons/{unit.name}.plist"
    else:
        domain, sudo, path = "gui/$(id -u)", "", f"$HOME/Library/LaunchAgents/{unit.name}.plist"
    job = f"{domain}/{shlex.quote(unit.name)}"
    mode = f'{sudo}chmod 644 "{path}"' + (
        f' && sudo chown root:wheel "{path}"' if unit.user else ""
    )
    socket = [
        (
            "Sockets: launchd listens, and the server takes the socket over: a client that connects"
            " while the model loads again waits instead of being refused."
        )
    ]
    return [
        f"save it as {path}, then:",
        f"  {mode}    # launchd refuses a file that others may write",
        f'  {sudo}launchctl bootstrap {domain} "{path}"    # install: start now, and at every '
        + ("boot" if unit.user else "login"),
        (
            f"  {sudo}launchctl print {job}"
            "    # look: `state`, `pid`, `last exit code` (docs/exit-codes.md)"
        ),
        f"  tail -f {shlex.quote(unit.log)}",
        (
            f"  {sudo}launchctl kill SIGTERM {job}"
            "    # restart: drains, ends with 0, and KeepAlive starts it again"
        ),
        (
            f"  {sudo}launchctl bootout {job}"
            f"    # stop and remove: drains for at most {unit.stop_limit} s"
        ),
        "`launchctl kickstart -k` kills at once (SIGKILL): nothing is drained. Use kill SIGTERM.",
        (
            "bootout returns before the job is gone, and a bootstrap right after it fails with 5 or"
            " 37. After a change:"
        ),
        (
            f"  {sudo}launchctl bootout {job}; for n in $(seq 60);"
            f' do {sudo}launchctl bootstrap {domain} "{path}" && break; sleep 1; done'
        ),
        (
            "KeepAlive true: launchd starts it again whatever the status, 0 included; bootout stops"
            " it. {Crashed: true} would restart nothing: an exit with a status is not a crash to"
            " launchd."
        ),
        (
            "ThrottleInterval 10: at most one start in 10 seconds. That slows a start that always"
            " fails."
        ),
        (
            f"ExitTimeOut {unit.stop_limit}: SIGKILL that long after SIGTERM. The drain, and"
            " telling the clients, take less."
        ),
        (
            "ProcessType Interactive: no limits on CPU and I/O; Background is throttled, which"
            " looks like a stall."
        ),
        *(socket if unit.socket else []),
        *([unit.note] if unit.note else []),
    ]
