"""MLX_SHIM_MEMORY_SOFT and MLX_SHIM_MEMORY_HARD in the plist, by the machine and the model."""

from __future__ import annotations

import plistlib

import pytest

from kit.harness import NEWEST, python_of
from kit.model_folders import weightless
from shim.core import memory

PYTHON = python_of(NEWEST)
GIB = 1 << 30
SOFT, HARD = "MLX_SHIM_MEMORY_SOFT", "MLX_SHIM_MEMORY_HARD"


@pytest.fixture
def limits(shim, monkeypatch):
    """The limits in a plist made on a machine of 64 GiB: (soft, hard, stderr)."""
    monkeypatch.setattr(memory, "total", lambda: 64 * GIB)

    def made(*command, env=()):
        options = [word for pair in env for word in ("--env", pair)]
        status, out, err = shim(
            "launchd", *options, "--", PYTHON, "-m", "mlx_lm", "server", *command
        )
        assert status == 0, err
        held = plistlib.loads(out.encode())["EnvironmentVariables"]
        return held.get(SOFT), held.get(HARD), err

    return made


def test_limits_on_memory_in_the_plist(shim, limits, tmp_path, monkeypatch):
    # The shell has it, the unit does not.
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = weightless(tmp_path / "model", 20 * GIB)
    repo = weightless(tmp_path / "hub" / "models--some--draft" / "snapshots" / "abc", 4 * GIB)
    large = weightless(tmp_path / "large", 60 * GIB)
    (repo.parents[1] / "refs").mkdir()
    (repo.parents[1] / "refs" / "main").write_text("abc")
    cut = weightless(tmp_path / "cut", GIB)
    (cut / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")

    soft, hard, err = limits("--model", folder)
    assert (soft, hard) == ("47513M", "54272M")
    assert (
        f"{SOFT}=47513M, {HARD}=54272M: from a model of 20.00 GiB and this machine's 64.00 GiB"
        in err
    )
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
    """Soft stays below hard, whichever of the two is computed."""
    folder = weightless(tmp_path / "model", 20 * GIB)
    soft, hard, err = limits("--model", folder, env=[f"{HARD}=50000M"])
    assert (soft, hard) == ("45000M", "50000M")
    assert f"this machine's 64.00 GiB, held to 90% of the {HARD}=50000M that is given" in err
    assert limits(env=[f"{HARD}=50%"])[:2] == ("29491M", "50%"), "a share does not exceed it either"
    assert limits("--model", folder, env=[f"{HARD}=56G"])[:2] == ("47513M", "56G"), (
        "it leaves room enough"
    )
    soft, hard, err = limits("--model", folder, env=[f"{SOFT}=54272M"])
    assert (soft, hard) == ("54272M", None)
    assert f"no {HARD}: 54272M, which it would be, is not above the given {SOFT}=54272M" in err
    assert limits("--model", folder, env=[f"{SOFT}=53G"])[:2] == ("53G", None)
    assert limits("--model", folder, env=[f"{SOFT}=52G"])[:2] == ("52G", "54272M")
    soft, hard, err = limits("--model", folder, env=[f"{HARD}=lots"])
    assert (soft, hard, f"{HARD}='lots' is not valid" in err) == ("47513M", "lots", True)
