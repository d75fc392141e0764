"""Makes a systemd service, with a socket where asked, and advice."""

from __future__ import annotations

import re

from . import Refused
from .plan import OPEN_FILES, Made, Unit, host_and_port

_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)


def made(unit: Unit) -> Made:
    """NAME.service, and NAME.socket. Raises Refused."""
    files = {f"{unit.name}.service": _service(unit)}
    if unit.socket:
        files[f"{unit.name}.socket"] = _socket(unit)
    return Made(files, _advice(unit))


def _service(unit: Unit) -> str:
    if "$" in unit.argv[0]:
        raise Refused(f"{unit.argv[0]!r}: systemd takes no path with a $ for a program")
    target = "multi-user.target" if unit.user else "default.target"
    needs = [f"Requires={unit.name}.socket", f"After={unit.name}.socket"] if unit.socket else []
    notify = ["NotifyAccess=main", "TimeoutStartSec=infinity"] + (
        [f"WatchdogSec={unit.watchdog}"] if unit.watchdog else []
    )
    lines = [
        "[Unit]",
        "Description=mlx_lm.server under mlx-lm-shim",
        *(["After=network-online.target", "Wants=network-online.target"] if unit.user else []),
        *needs,
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"Type={'notify' if unit.notify else 'exec'}",
        *(notify if unit.notify else []),
        "ExecStart=" + " ".join(quote(word).replace("$", "$$") for word in unit.argv),
        *(
            f"Environment={quote(f'{name}={value}')}"
            for name, value in sorted(unit.environ.items())
        ),
        f"WorkingDirectory={escape_specifiers(unit.workdir)}",
        *([f"User={unit.user}"] if unit.user else []),
        *(
            [f"StandardOutput=append:{escape_specifiers(unit.log)}", "StandardError=inherit"]
            if unit.log
            else []
        ),
        "Restart=always",
        "RestartSec=1",
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        f"TimeoutStopSec={unit.stop_limit}",
        f"LimitNOFILE={OPEN_FILES}",
        "",
        "[Install]",
        f"WantedBy={target}",
    ]
    return "\n".join(lines) + "\n"


def _socket(unit: Unit) -> str:
    lines = [
        "[Unit]",
        "Description=The socket of mlx_lm.server, which outlives it",
        "",
        "[Socket]",
        f"ListenStream={host_and_port(unit)}",
        "",
        "[Install]",
        "WantedBy=sockets.target",
    ]
    return "\n".join(lines) + "\n"


def quote(word: str) -> str:
    """Quote a word as in systemd.syntax(7), specifiers escaped. In ExecStart, double each $ too."""
    if _PLAIN.fullmatch(word):
        return word
    return '"' + escape_specifiers(word).replace("\\", "\\\\").replace('"', '\\"') + '"'


def escape_specifiers(text: str) -> str:
    """Escape the specifiers in a text that systemd otherwise takes as it is."""
    return text.replace("%", "%%")


def _advice(unit: Unit) -> list[str]:
    user = "" if unit.user else " --user"
    sudo = "sudo " if unit.user else ""
    folder = "/etc/systemd/system" if unit.user else "~/.config/systemd/user"
    units = f"{unit.name}.socket {unit.name}.service" if unit.socket else f"{unit.name}.service"
    linger = "a unit of your own ends when you log out, unless: loginctl enable-linger"
    notify = (
        "Type=notify: started means that the model answers; a death is noticed by the watchdog too."
    )
    return [
        f"save it in {folder}, then:",
        f"  {sudo}systemctl{user} daemon-reload",
        f"  {sudo}systemctl{user} enable --now {units}    # install: start now, and at every "
        + ("boot" if unit.user else "login"),
        f"  systemctl{user} status {unit.name}    # look: the last status (docs/exit-codes.md)",
        f"  journalctl{user} -f -u {unit.name}",
        (
            f"  {sudo}systemctl{user} restart {unit.name}"
            f"    # restart: drains for at most {unit.stop_limit} s"
        ),
        f"  {sudo}systemctl{user} disable --now {units}    # stop and remove",
        *([] if unit.user else [linger]),
        (
            "Restart=always with StartLimitIntervalSec=0: systemd starts it again whatever the"
            " status, without limit; `systemctl stop` stops it. A start that always fails (78) is"
            " tried again too, since the disk or the hub may come back; add"
            " RestartPreventExitStatus=78 to have it stay down."
        ),
        (
            f"KillMode=mixed and TimeoutStopSec={unit.stop_limit}: SIGTERM to the server, SIGKILL"
            " to all processes that long after it. The drain, and telling the clients, take less."
        ),
        *([notify] if unit.notify else []),
    ]
