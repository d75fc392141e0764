"""However the server is started it is guarded, also where wrapt is missing or wrong.

Other programs of mlx_lm stay silent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kit.harness import (
    KILLER,
    LINES,
    NEWEST,
    REPO,
    VENVS,
    Server,
    clean_environ,
    expect_zombie,
    python_of,
)

pytestmark = pytest.mark.usefixtures("killable")


def console_script(line):
    return str(VENVS / line / "bin" / "mlx_lm.server")


WAYS = {
    "python -m mlx_lm.server": lambda line: ("-m", "mlx_lm.server"),
    "python -m mlx_lm server": lambda line: ("-m", "mlx_lm", "server"),
    "console script": lambda line: (console_script(line),),
    "a program": lambda line: ("-c", "from mlx_lm.server import main; main()"),
    "runpy from a program": lambda line: (
        "-c",
        "import runpy; runpy.run_module('mlx_lm.server', run_name='__main__')",
    ),
    "python -m shim run": lambda line: ("-m", "shim", "run"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_is_guarded(line, tiny, tmp_path, way):
    with Server(line, tiny, tmp_path / "log", entry=WAYS[way](line), fresh=True) as server:
        server.ready()
        assert sum("guards: " in x for x in server.shim_lines()) == 1
        assert server.text().count("is deprecated") == (
            way in ("python -m mlx_lm.server", "runpy from a program")
        )
        server.send_and_leave(KILLER)
        assert server.wait_exit(30) == 70


def test_control_for_the_ways_in(line, tiny, tmp_path):
    with Server(
        line, tiny, tmp_path / "log", entry=("-m", "mlx_lm.server"), environ={"PYTHONPATH": None}
    ) as server:
        server.ready().send_and_leave(KILLER)
        expect_zombie(server)


def test_a_worker_spawned_by_the_server_does_not_start_another(line, tmp_path):
    """multiprocessing re-imports the main module by name, and our loader is asked for it."""
    program = tmp_path / "sitecustomize.py"
    program.write_text(
        textwrap.dedent("""
        import sys, threading
        def spawn():
            import multiprocessing, os
            worker = multiprocessing.get_context("spawn").Process(target=os.getpid)
            worker.start(); worker.join(); print("WORKER", worker.exitcode, flush=True); os._exit(5)
        if "-m" in sys.argv: threading.Timer(4, spawn).start()
    """)
    )
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{tmp_path}"}
    with Server(
        line, None, tmp_path / "log", entry=("-m", "mlx_lm.server"), environ=environ
    ) as server:
        assert server.wait_exit() == 5
        assert "WORKER 0" in server.text(), server.text()
        assert sum("guards: " in x for x in server.shim_lines()) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import mlx_lm",
        "import mlx_lm.generate, mlx_lm.lora",
        "import mlx_lm.server",
        "import mlx_lm.models.cache",
    ],
)
def test_other_uses_of_mlx_lm_are_silent(line, code):
    child = subprocess.run(
        [python_of(line), "-c", code],
        capture_output=True,
        check=True,
        env=clean_environ(PYTHONPATH=str(REPO)),
    )
    assert (child.stdout, child.stderr) == (b"", b"")


def test_looking_mlx_lm_up_loads_nothing(line):
    code = (
        "import importlib.util, sys; importlib.util.find_spec('mlx_lm'); "
        "print([m for m in sys.modules if m in ('shim', 'wrapt')])"
    )
    child = subprocess.run(
        [python_of(line), "-c", code],
        capture_output=True,
        check=True,
        text=True,
        env=clean_environ(PYTHONPATH=str(REPO)),
    )
    assert child.stdout.strip() == "[]"


def test_the_import_machinery_is_left_as_it_was(line):
    """The finder is gone, the loaders are stock's."""
    code = textwrap.dedent("""
        import sys, mlx_lm.server as server
        assert "MlxLmShimFinder" not in [type(f).__name__ for f in sys.meta_path]
        for module in (sys.modules["mlx_lm"], server):
            assert type(module.__loader__).__name__ == "SourceFileLoader", module.__loader__
            assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
            assert "exec_module" not in vars(module.__loader__)
    """)
    subprocess.run(
        [python_of(line), "-c", code], check=True, env=clean_environ(PYTHONPATH=str(REPO))
    )


def test_a_program_with_a_module_shim_of_its_own(line, tiny, tmp_path):
    (tmp_path / "shim.py").write_text("MINE = True\n")
    program = tmp_path / "program.py"
    program.write_text("from mlx_lm.server import main\nimport shim\nassert shim.MINE\nmain()\n")
    with Server(line, tiny, tmp_path / "log", entry=(str(program),), fresh=True) as server:
        server.ready().send_and_leave(KILLER)
        assert server.wait_exit(30) == 70


def wrapt_release(version, tmp_path):
    target = VENVS / f"wrapt-{version}"
    assert target.is_dir(), f"tests/run.py puts wrapt {version} into {target}"
    return str(target)


def no_wrapt(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['wrapt'] = None\n")
    return str(tmp_path)


def stub_wrapt(text):
    def make(tmp_path):
        (tmp_path / "wrapt.py").write_text(text)
        return str(tmp_path)

    return make


WRAPTS = {
    "missing": (no_wrapt, "wrapt cannot be imported"),
    "1.15.0": (
        lambda p: wrapt_release("1.15.0", p),
        "wrapt 1.15.0 cannot be used (wanted: 1.16 or newer, not 2.2.0)",
    ),
    "2.2.0": (lambda p: wrapt_release("2.2.0", p), "wrapt 2.2.0 cannot be used"),
    "an empty stub": (stub_wrapt(""), "is not the package wrapt"),
    "a stub that raises": (stub_wrapt("1 / 0\n"), "wrapt cannot be imported (ZeroDivisionError"),
    "a stub that exits": (
        stub_wrapt("raise SystemExit(4)\n"),
        "wrapt cannot be imported (SystemExit",
    ),
}


ENTRIES = {"module": ("-m", "mlx_lm.server"), "cli": ("-m", "mlx_lm", "server")}
# Each case once, and the first of them, the likeliest, in each way on each line.
WITHOUT_WRAPT = [("missing", entry, line) for entry in ENTRIES for line in LINES] + [
    (case, tuple(ENTRIES)[n % 2], LINES[n // 2 % 2]) for n, case in enumerate(list(WRAPTS)[1:])
]


@pytest.mark.parametrize(("case", "entry", "line"), WITHOUT_WRAPT)
def test_without_a_usable_wrapt_deaths_are_still_guarded(line, tiny, tmp_path, case, entry):
    make, complaint = WRAPTS[case]
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{make(tmp_path)}"}
    with Server(
        line, tiny, tmp_path / "log", environ=environ, entry=ENTRIES[entry], fresh=True
    ) as server:
        server.ready()
        (said,) = [x for x in server.shim_lines() if complaint in x]
        assert "install wrapt" in said
        assert any(
            "leaking_advance incompatible (it needs wrapt)" in x for x in server.shim_lines()
        )
        server.send_and_leave(KILLER)
        assert server.wait_exit(30) == 70


@pytest.mark.parametrize("version", ["1.16.0", "1.17.3"])
def test_the_oldest_wrapts_that_are_accepted_work(tiny, tmp_path, version):
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{wrapt_release(version, tmp_path)}"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        server.ready().send_and_leave(KILLER)
        assert server.wait_exit(30) == 70
        assert not any("cannot be used" in x for x in server.shim_lines())


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        ("raise SystemExit(3)\n", "SystemExit(3)"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("def start(:\n", "SyntaxError"),
    ],
)
def test_a_bug_of_ours_never_stops_the_server(tiny, tmp_path, break_it, says):
    copy = tmp_path / "copy"
    shutil.copytree(REPO / "shim", copy / "shim")
    shutil.copy(REPO / "sitecustomize.py", copy)
    (copy / "shim" / "boot.py").write_text(break_it)
    with Server(NEWEST, tiny, tmp_path / "log", environ={"PYTHONPATH": str(copy)}) as server:
        server.ready()
        (said,) = server.shim_lines()
        assert said.startswith("mlx-lm-shim: not active: ")
        assert says in said


DRIFT = """
import sys
# Takes a name from mlx_lm.server as it is imported, as a future release may.
class Drift:
    def find_spec(self, name, path=None, target=None):
        if name != "mlx_lm.server": return None
        from importlib.machinery import PathFinder
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            delattr(module.CLASS, "METHOD")
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Drift())
"""


@pytest.mark.parametrize(
    ("path", "strict", "said"),
    [
        # Two that stock calls only when it is stopped with Ctrl-C, or asked for its models.
        (
            "ResponseGenerator.stop_and_join",
            "2",
            "endless_wait degraded (cannot see stops (mlx_lm.server has no",
        ),
        (
            "APIHandler.handle_models_request",
            "1",
            "empty_model_list incompatible (mlx_lm.server has no",
        ),
    ],
)
def test_strict_refuses_a_guard_that_does_not_fit(tiny, tmp_path, path, strict, said):
    """Without STRICT the server runs, and says so.

    1 refuses an incompatible guard, 2 a degraded one as well.
    """
    owner, _, name = path.partition(".")
    (tmp_path / "sitecustomize.py").write_text(
        DRIFT.replace("CLASS", owner).replace("METHOD", name)
    )
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{tmp_path}"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        server.ready()
        assert any(f"{said} {path})" in x for x in server.shim_lines()), server.text()
        assert any("guards: " in x and " 1 incompatible" in x for x in server.shim_lines()) == (
            strict == "1"
        )
    with Server(
        NEWEST, tiny, tmp_path / "strict", environ=environ | {"MLX_SHIM_STRICT": strict}
    ) as server:
        assert server.wait_exit() == 78
        assert f"MLX_SHIM_STRICT refuses to start: {said.split()[0]}" in server.text()


def test_bad_values_and_unknown_names(tiny, tmp_path):
    environ = {"MLX_SHIM_ON_DEATH": "recover", "MLX_SHIM_GENERATON_DEATH": "0"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        server.ready()
        bad = "MLX_SHIM_ON_DEATH='recover' is not valid; accepted: exit; using the default exit"
        unknown = (
            "MLX_SHIM_GENERATON_DEATH is not a setting of the shim; "
            "the nearest known name is MLX_SHIM_GENERATION_DEATH"
        )
        assert f"mlx-lm-shim: {bad}" in server.shim_lines()
        assert f"mlx-lm-shim: {unknown}" in server.shim_lines()
    with Server(
        NEWEST, tiny, tmp_path / "strict", environ=environ | {"MLX_SHIM_STRICT": "1"}
    ) as server:
        assert server.wait_exit() == 78
        assert "up " in server.text()
        assert "MLX_SHIM_STRICT refuses to start: MLX_SHIM_ON_DEATH='recover'" in server.text()


def test_importable_names_of_the_folder():
    """All that a PYTHONPATH entry exposes to every program that inherits it."""
    names = {p.stem for p in Path(REPO).iterdir() if p.suffix == ".py"}
    names |= {p.name for p in Path(REPO).iterdir() if (p / "__init__.py").exists()}
    assert names == {"sitecustomize", "shim"}
    assert not (REPO / "tests" / "__init__.py").exists(), "nor are the tests a package"
    assert sys.version_info >= (3, 11)
