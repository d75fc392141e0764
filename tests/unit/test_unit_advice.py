"""The commands that `python -m shim launchd | systemd | supervisord` print with a unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.harness import NEWEST, python_of

PYTHON = python_of(NEWEST)

# For each kind and its options: the beginnings of lines that the advice must have, in this order.
MINE = "$HOME/Library/LaunchAgents/local.mlx-lm.plist"
ALL = "/Library/LaunchDaemons/local.mlx-lm.plist"
AGENT, DAEMON = "gui/$(id -u)", "system"
SOCKETED = "mlx-lm.socket mlx-lm.service"
ROOT = ("--daemon", "--user", "root")
AGAIN = (
    "  {0}launchctl bootout {1}/local.mlx-lm; for n in $(seq 60);"
    ' do {0}launchctl bootstrap {1} "{2}" && break; sleep 1; done'
)
ADVICE = [
    (
        "launchd",
        (),
        [
            f"save it as {MINE}, then:",
            f'  chmod 644 "{MINE}"',
            f'  launchctl bootstrap {AGENT} "{MINE}"    # install',
            f"  launchctl print {AGENT}/local.mlx-lm    # look",
            "  tail -f ",
            f"  launchctl kill SIGTERM {AGENT}/local.mlx-lm ",
            f"  launchctl bootout {AGENT}/local.mlx-lm    # stop and remove",
            "`launchctl kickstart -k` kills at once (SIGKILL)",
            "bootout returns before the job is gone",
            AGAIN.format("", AGENT, MINE),
        ],
    ),
    (
        "launchd",
        (*ROOT, "--socket"),
        [
            f"save it as {ALL}, then:",
            f'  sudo chmod 644 "{ALL}" && sudo chown root:wheel "{ALL}"',
            f'  sudo launchctl bootstrap {DAEMON} "{ALL}"    # install',
            f"  sudo launchctl print {DAEMON}/local.mlx-lm    # look",
            "  tail -f ",
            f"  sudo launchctl kill SIGTERM {DAEMON}/local.mlx-lm ",
            f"  sudo launchctl bootout {DAEMON}/local.mlx-lm    # stop and remove",
            "`launchctl kickstart -k` kills at once",
            "bootout returns before the job is gone",
            AGAIN.format("sudo ", DAEMON, ALL),
            "Sockets: ",
        ],
    ),
    (
        "systemd",
        (),
        [
            "save it in ~/.config/systemd/user, then:",
            "  systemctl --user daemon-reload",
            "  systemctl --user enable --now mlx-lm.service    # install",
            "  systemctl --user status mlx-lm    # look",
            "  journalctl --user -f -u mlx-lm",
            "  systemctl --user restart mlx-lm    # restart",
            "  systemctl --user disable --now mlx-lm.service    # stop and remove",
            "a unit of your own ends when you log out",
        ],
    ),
    (
        "systemd",
        (*ROOT, "--socket"),
        [
            "save it in /etc/systemd/system, then:",
            "  sudo systemctl daemon-reload",
            f"  sudo systemctl enable --now {SOCKETED}    # install",
            "  systemctl status mlx-lm    # look",
            "  journalctl -f -u mlx-lm",
            "  sudo systemctl restart mlx-lm    # restart",
            f"  sudo systemctl disable --now {SOCKETED}    # stop and remove",
        ],
    ),
    (
        "supervisord",
        (),
        [
            "save it as mlx-lm.conf in a folder",
            "  supervisorctl reread && supervisorctl update    # install",
            "  supervisorctl status mlx-lm    # look",
            "  supervisorctl tail -f mlx-lm",
            "  supervisorctl restart mlx-lm    # restart",
            "  supervisorctl stop mlx-lm    # stop; remove the file and `update`",
            "minfds in [supervisord], 1024 unless set,",
        ],
    ),
    (
        "supervisord",
        ("--socket",),
        [
            "save it as mlx-lm.conf in a folder",
            "  supervisorctl reread && supervisorctl update    # install",
            "  supervisorctl status mlx-lm:mlx-lm_1    # look",
            "  supervisorctl tail -f mlx-lm:mlx-lm_1",
            "  supervisorctl restart mlx-lm:mlx-lm_1    # restart",
            "  supervisorctl stop mlx-lm:*    # stop; remove the file",
            "mlx-lm_0 only holds the socket",
        ],
    ),
]


@pytest.mark.parametrize(("kind", "options", "wanted"), ADVICE)
def test_the_commands_to_install_look_restart_and_remove(shim, model, kind, options, wanted):
    command = (PYTHON, "-m", "mlx_lm", "server", "--model", model)
    status, _, err = shim(kind, *options, "--output", Path(model).parent, "--", *command)
    assert status == 0, err
    lines = iter(line.removeprefix("mlx-lm-shim: ") for line in err.splitlines())
    # Each comes after the one before, because `lines` is an iterator.
    for beginning in wanted:
        assert any(line.startswith(beginning) for line in lines), (beginning, err)
