"""python -m shim run | doctor | path, from a checkout and from an installed wheel."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kit.harness import KILLER, NEWEST, REPO, VENVS, Server, clean_environ, python_of
from kit.model_folders import weightless
from shim.cli import tiny_model
from shim.core import memory
from shim.planning import budget


def shim(*arguments, line=NEWEST, cwd=REPO, **environ):
    return subprocess.run(
        [python_of(line), "-m", "shim", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=clean_environ(**environ),
    )


def test_run_without_a_model_serves_the_tiny_one(line, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), "PYTHONPATH": None}
    # The file is made, then found.
    for _ in range(2):
        with Server(
            line, None, tmp_path / "log", entry=("-m", "shim", "run"), cwd=REPO, environ=environ
        ) as server:
            server.ready()
            assert any(
                "no --model given: serving a tiny random model" in x for x in server.shim_lines()
            )
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            status, answer = server.post(chat, "/v1/chat/completions")
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
            server.process.send_signal(signal.SIGKILL)
            assert server.wait_exit() == -signal.SIGKILL, (
                "run became the server: signals reach it, its status is the status"
            )


def test_run_passes_arguments_on_unchanged(tiny, tmp_path):
    entry = ("-m", "shim", "run", f"--mod={tiny}", "--log-level", "DEBUG")
    with Server(
        NEWEST, None, tmp_path / "log", entry=entry, cwd=REPO, environ={"PYTHONPATH": None}
    ) as server:
        server.ready()
        assert "no --model given" not in server.text()
        assert "DEBUG" in server.text()


def test_run_keeps_the_pythonpath_that_was_there(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('CHAINED')\n")
    answer = shim("run", "--help", PYTHONPATH=str(tmp_path))
    assert answer.returncode == 0
    assert answer.stdout.count("CHAINED") == 2, "in `python -m shim`, and in the server"
    assert "--decode-concurrency" in answer.stdout


def test_run_where_no_cache_folder_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    answer = shim("run", XDG_CACHE_HOME=str(tmp_path / "file"), HOME=str(tmp_path / "file"))
    assert answer.returncode == 78
    assert "the tiny model cannot be made" in answer.stderr


def test_run_without_mlx(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mlx'] = None\n")
    answer = shim("run", PYTHONPATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))
    assert answer.returncode == 78
    assert "install the server: pip install mlx-lm" in answer.stderr


def test_path(tmp_path):
    answer = shim("path")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"{REPO}\n", "")


def test_a_command_that_does_not_exist():
    answer = shim("runn")
    assert answer.returncode == 2
    assert "invalid choice: 'runn'" in answer.stderr


def test_doctor_when_all_is_well(line):
    answer = shim("doctor", line=line, PYTHONPATH=str(REPO))
    assert answer.returncode == 0, answer.stdout
    assert f"mlx-lm {line}" in answer.stdout
    assert "generation_death        active" in answer.stdout
    assert "unlimited_queue         off (MLX_SHIM_MAX_INFLIGHT is not set)" in answer.stdout
    assert "sitecustomize chained: none" in answer.stdout
    assert "does not name the shim" not in answer.stdout


def test_doctor_tells_a_memory_budget(tiny, tmp_path, line):
    answer = shim("doctor", "--model", str(tiny), line=line, MLX_SHIM_WIRED="off")
    assert answer.returncode == 0, answer.stderr
    told = " ".join(answer.stdout.split())
    total = memory.total()
    advised = budget.recommended(total, (tiny / "model.safetensors").stat().st_size)
    per_token = (
        tiny_model.LAYERS * tiny_model.KV_HEADS * tiny_model.HIDDEN // tiny_model.HEADS * 2 * 4
    )
    for what in (
        f"memory of this machine: {memory.format_bytes(total)}",
        "wiring MLX_SHIM_WIRED=off in force",
        "which is off for a model below 60% of the memory",
        "limits soft none, hard none in force",
        (
            f"MLX_SHIM_MEMORY_SOFT={budget.as_setting(advised.soft)} "
            f"MLX_SHIM_MEMORY_HARD={budget.as_setting(advised.hard)}"
        ),
        f"a token's cache {per_token / 1024:.1f} KiB, float32",
        "256k tokens",
        "generation_death active",
    ):
        assert what in told, what


def test_doctor_tells_of_models_that_are_hard_to_judge(tmp_path):
    large = weightless(
        tmp_path / "large", memory.total(), model_type="llama", model_file="model.py"
    )
    answer = shim("doctor", "--model", str(large))
    assert answer.returncode == 0, answer.stderr
    for what in (
        "none: the model takes more than 80% of the memory",
        "not known before the first finished request: it brings code of its own",
        "which is model+4G for a model of at least 60% of the memory",
    ):
        assert what in answer.stdout, what
    for name, why in (
        ("no/such", "'no/such': neither a folder that is there nor in the cache of the hub"),
        (str(tmp_path), "it has no config.json"),
    ):
        answer = shim("doctor", "--model", name, HF_HOME=str(tmp_path))
        assert answer.returncode == 2
        assert why in answer.stderr
        assert (
            "accepted: a folder with a model, or a Hugging Face repo that is in the local cache"
            in answer.stderr
        )


def test_doctor_tells_settings_chain_and_pythonpath(tmp_path):
    (tmp_path / "sitecustomize.py").touch()
    environ = {
        "MLX_SHIM_GENERATION_DEATH": "0",
        "MLX_SHIM_ON_DEATH": "never",
        "MLX_SHIM_STRCT": "1",
    }
    answer = shim("doctor", PYTHONPATH=str(tmp_path), **environ)
    assert answer.returncode == 0, "a guard that was turned off is no fault"
    assert "generation_death        off (MLX_SHIM_GENERATION_DEATH is off)" in answer.stdout
    assert "MLX_SHIM_ON_DEATH='never' is not valid" in answer.stdout
    assert "the nearest known name is MLX_SHIM_STRICT" in answer.stdout
    assert f"sitecustomize chained: {tmp_path}/sitecustomize.py" in answer.stdout
    assert f"Start the server with PYTHONPATH={REPO}{os.pathsep}{tmp_path}" in answer.stdout


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"MLX_SHIM": "0"}, "FIX: unset MLX_SHIM"),
        (
            {"MLX_SHIM_STRICT": "1", "MLX_SHIM_ON_DEATH": "never"},
            "FIX: MLX_SHIM_ON_DEATH='never' is not valid",
        ),
        (
            {"PYTHONPATH": str(VENVS / "wrapt-1.15.0")},
            "FIX: pip install 'wrapt>=1.16,!=2.2.0': wrapt 1.15.0",
        ),
    ],
)
def test_doctor_names_what_is_wrong_and_the_fix(environ, says):
    answer = shim("doctor", **environ)
    assert answer.returncode == 1
    assert says in answer.stdout


def test_doctor_where_another_sitecustomize_comes_first(tmp_path):
    (tmp_path / "sitecustomize.py").touch()
    answer = shim("doctor", PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}")
    assert answer.returncode == 1
    assert f"NOT GUARDED: {tmp_path}/sitecustomize.py comes first" in answer.stdout


def test_doctor_bears_a_chained_sitecustomize_that_prints(tmp_path):
    text = "import atexit, sys\nsys.stdout.buffer.write(b'\\xff')\natexit.register(print, 'bye')\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    child = subprocess.run(
        [python_of(NEWEST), "-m", "shim", "doctor"],
        capture_output=True,
        check=False,
        cwd=REPO,
        env=clean_environ(PYTHONPATH=str(tmp_path)),
    )
    assert child.returncode == 0, child.stderr


def test_doctor_without_mlx_lm(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['mlx_lm'] = None\n")
    answer = shim("doctor", PYTHONPATH=str(tmp_path))
    assert answer.returncode == 1
    assert "mlx_lm.server cannot be imported" in answer.stdout
    assert "FIX: pip install mlx-lm" in answer.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A virtual environment that sees the newest mlx-lm and has our wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [python_of(NEWEST), "-m", "pip", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", str(folder), str(REPO)], check=True, env=clean_environ()
    )
    (wheel,) = folder.glob("*.whl")
    venv = folder / "venv"
    subprocess.run([python_of(NEWEST), "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    (theirs,) = (VENVS / NEWEST).glob("lib/python3*/site-packages")
    (site / "newest.pth").write_text(f"{theirs}\n")
    install = [
        *pip,
        "--python",
        str(venv / "bin" / "python"),
        "install",
        "--no-deps",
        "--ignore-installed",
        str(wheel),
    ]
    subprocess.run(install, check=True, env=clean_environ())
    return venv


@pytest.mark.usefixtures("killable")
def test_an_installed_wheel(installed, tiny, tmp_path):
    script = installed / "bin" / "mlx-lm-shim"
    told = subprocess.run(
        [str(script), "path"], capture_output=True, text=True, check=True, env=clean_environ()
    ).stdout
    folder = Path(told.strip())
    assert [p.name for p in folder.iterdir() if p.name != "__pycache__"] == ["sitecustomize.py"]
    doctor = subprocess.run(
        [str(script), "doctor"], capture_output=True, text=True, check=False, env=clean_environ()
    )
    assert doctor.returncode == 0, doctor.stdout
    python = str(installed / "bin" / "python")
    ways = {
        "its own environment": ((python, "-m", "mlx_lm", "server"), {"PYTHONPATH": str(folder)}),
        "another environment": (
            (python_of(NEWEST), "-m", "mlx_lm", "server"),
            {"PYTHONPATH": str(folder)},
        ),
        "run": ((str(script), "run"), {"PYTHONPATH": None}),
    }
    for way, (command, environ) in ways.items():
        log = tmp_path / way
        with Server(NEWEST, tiny, log, entry=command, environ=environ) as server:
            server.ready().send_and_leave(KILLER)
            assert server.wait_exit(30) == 70, way
