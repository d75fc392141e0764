"""What `python -m shim doctor` does with answers that a healthy installation does not give."""

from __future__ import annotations

import subprocess

import pytest

from shim.cli import doctor
from shim.cli.releases import TRIED

REASON = "mlx_lm.server has no mx"


def found(**states):
    return {
        "states": {name: [kind, REASON] for name, kind in states.items()},
        "wrapt": "",
        "chained": None,
    }


ASKED = {
    "overwired_memory": ("MLX_SHIM_WIRED", "off"),
    "open_door": ("MLX_SHIM_API_KEY_FILE", "/etc/key"),
}


@pytest.mark.parametrize("guard", ASKED)
@pytest.mark.parametrize("kind", ["incompatible", "failed", "retired"])
def test_what_a_setting_asks_for_and_no_guard_gives(guard, kind, monkeypatch, capsys):
    """No server starts then, whatever MLX_SHIM_STRICT is."""
    variable, value = ASKED[guard]
    monkeypatch.setattr(doctor, "_ask", lambda: found(**{guard: kind}))
    monkeypatch.setenv(variable, value)
    assert doctor.main() == 1
    assert (
        f"FIX: {guard} is {kind}: {REASON}; the server does not start (78) while {variable} is set"
        in (capsys.readouterr().out)
    )


@pytest.mark.parametrize(
    ("value", "kind"), [("off", "active"), ("off", "off"), ("stock", "retired"), ("", "off")]
)
def test_what_is_given_or_not_asked_for_is_no_fault(value, kind, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_ask", lambda: found(overwired_memory=kind))
    monkeypatch.setenv("MLX_SHIM_WIRED", value)
    assert doctor.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("0.32.2", "mlx-lm 0.32.2 is one of the releases this shim was tried with"),
        (
            "0.33.0",
            (
                f"mlx-lm 0.33.0 has not been tried with this shim (tried: {', '.join(TRIED)});"
                " the states below say"
            ),
        ),
        (doctor._ABSENT, None),
    ],
)
def test_whether_the_release_was_tried_is_said_and_decides_nothing(
    release, says, monkeypatch, capsys
):
    monkeypatch.setattr(doctor, "_version", lambda name: release if name == "mlx-lm" else "1.0")
    monkeypatch.setattr(doctor, "_ask", found)
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines[lines.index("wrapt 1.0") + 1]
    assert after.startswith(says or "memory of this machine")


def test_a_child_that_does_not_answer(monkeypatch, capsys):
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert (
        "NOT GUARDED: the guards cannot be asked: mlx_lm.server was not imported within 300 s"
        in said
    )
    assert "FIX: " in said
