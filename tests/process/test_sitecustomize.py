"""Under our PYTHONPATH every other Python behaves byte for byte as without it.

That includes the sitecustomize that ours shadows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kit.harness import NEWEST, REPO, clean_environ, python_of

# Every interpreter of pyenv on this machine, the system's, and the one that runs the tests.
PYTHONS = sorted(
    {
        str(p)
        for p in (
            *Path.home().glob(".pyenv/versions/*/bin/python"),
            Path("/usr/bin/python3"),
            Path(python_of(NEWEST)),
        )
        if p.exists()
    }
)
REPORT = """
import sys
names = ("shim", "wrapt", "threading", "logging", "sitecustomize")
print(sorted(m for m in sys.modules if m.split(".")[0] in names))
print([p for p in sys.path if p not in OURS])
print([type(f).__name__ for f in sys.meta_path if type(f).__name__ != "MlxLmShimFinder"])
"""


def run(python, code, pythonpath, *flags, cwd, **environ):
    """(stdout, stderr, status) of a child. OURS names our folders, for REPORT to leave out."""
    ours = [str(REPO), str(REPO) + "/", os.path.realpath(REPO), str(cwd / "link")]
    child = subprocess.run(
        [python, *flags, "-c", f"OURS = {ours!r}\n{code}"],
        capture_output=True,
        check=False,
        cwd=cwd,
        env=clean_environ(PYTHONPATH=pythonpath, **environ),
    )
    return child.stdout, child.stderr, child.returncode


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("flags", [(), ("-s",), ("-v",), ("-I",), ("-E",), ("-S",)], ids=str)
def test_every_python_is_as_without_us(python, flags, tmp_path):
    if "-I" in flags and "/2.7" in python:
        flags = ("-Es",)
    without, under = (run(python, REPORT, path, *flags, cwd=tmp_path) for path in (None, str(REPO)))
    # With -v stderr lists every file that was looked at, ours too.
    if "-v" in flags:
        without, under = ((out, None, status) for out, _, status in (without, under))
    assert under == without


@pytest.mark.parametrize("python", PYTHONS)
def test_the_finder_is_there_from_python_3_10_on(python, tmp_path):
    code = """if True:
        import sys
        print('MlxLmShimFinder' in [type(f).__name__ for f in sys.meta_path])
        print(sys.version_info >= (3, 10))
    """
    out, err, status = run(python, code, str(REPO), cwd=tmp_path)
    assert (out.split() in ([b"True"] * 2, [b"False"] * 2), err, status) == (True, b"", 0)


SPELLINGS = {
    "absolute": lambda cwd: str(REPO),
    "trailing slash": lambda cwd: f"{REPO}/",
    "doubled": lambda cwd: f"{REPO}{os.pathsep}{REPO}",
    "doubled through a link": lambda cwd: f"{cwd / 'link'}{os.pathsep}{REPO}",
    "empty entries": lambda cwd: f"{os.pathsep}{REPO}{os.pathsep}",
    "relative": lambda cwd: os.path.relpath(REPO, cwd),
    "with dots": lambda cwd: f"{REPO}/docs/..",
}
SHADOWED = """
import sys
print("SHADOWED RAN")
sys.path.append("/appended/by/it")
sys.path.insert(0, "/prepended/by/it")
"""
ENDINGS = {
    "plain": "",
    "raises": "raise ValueError('shadowed')",
    "raises ImportError": "import no_such_module",
    "exits": "sys.exit(7)",
    "interrupts": "raise KeyboardInterrupt",
}
FATAL = ("exits", "interrupts")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", ["none", "shadowed"])
def test_every_spelling_of_pythonpath(spelling, kind, tmp_path):
    (tmp_path / "link").symlink_to(REPO)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if kind == "shadowed":
        (theirs / "sitecustomize.py").write_text(SHADOWED)
    code = "import sys\nprint(sum(type(f).__name__ == 'MlxLmShimFinder' for f in sys.meta_path))\n"
    ours = SPELLINGS[spelling](tmp_path)
    out, err, status = run(python_of(NEWEST), code, f"{ours}{os.pathsep}{theirs}", cwd=tmp_path)
    assert (err, status) == (b"", 0)
    assert out.decode().split("\n")[:-1] == (["SHADOWED RAN"] if kind == "shadowed" else []) + ["1"]


def without_frames(result):
    """SystemExit and KeyboardInterrupt end the interpreter with a traceback.

    In it our import is one frame more.
    """
    out, err, status = result
    return out, [line for line in err.splitlines() if not line.startswith(b"  ")], status


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_shadowed_sitecustomize_runs_once_and_ends_as_without_us(python, ending, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(f"{SHADOWED}{ENDINGS[ending]}\n")
    without = run(python, REPORT, str(theirs), cwd=tmp_path)
    under = run(python, REPORT, f"{REPO}{os.pathsep}{theirs}", cwd=tmp_path)
    if ending in FATAL:
        under, without = without_frames(under), without_frames(without)
    assert under == without
    assert under[0].count(b"SHADOWED RAN") == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_sitecustomize_in_the_standard_library_as_homebrew_has_it(ending, tmp_path):
    """Behind every PYTHONPATH entry, in a folder that Python itself puts on sys.path."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "sitecustomize.py").write_text(f"{SHADOWED}{ENDINGS[ending]}\n")
    python = str(venv / "bin" / "python")
    without, under = (run(python, REPORT, path, cwd=tmp_path) for path in (None, str(REPO)))
    if ending in FATAL:
        under, without = without_frames(under), without_frames(without)
    assert under == without
    assert under[0].count(b"SHADOWED RAN") == 1


def test_a_second_copy_of_the_shim_does_not_install_itself_again(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(REPO / "sitecustomize.py", copy)
    code = "import sys\nprint(sum(type(f).__name__ == 'MlxLmShimFinder' for f in sys.meta_path))\n"
    out, err, _ = run(python_of(NEWEST), code, f"{REPO}{os.pathsep}{copy}", cwd=tmp_path)
    assert (out, err) == (b"1\n", b"")


@pytest.mark.parametrize("value", ["0", "off", "False", "NO"])
def test_the_kill_switch_leaves_nothing(value, tmp_path):
    code = textwrap.dedent("""
        import sys, signal, threading
        if PROBE: import mlx_lm.server
        print(sys.meta_path, sorted(m for m in sys.modules if "shim" in m or m == "sitecustomize"))
        print(threading.excepthook, [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])
    """).replace("0x", "")
    for probe in (False, True):
        outputs = [
            run(python_of(NEWEST), f"PROBE = {probe}\n{code}", path, cwd=tmp_path, MLX_SHIM=value)
            for path in (None, str(REPO))
        ]
        without, under = ([strip_addresses(part) for part in output[:2]] for output in outputs)
        assert under == without
        assert b"MlxLmShim" not in under[0]


def test_under_the_kill_switch_the_folder_is_not_on_sys_path(tmp_path):
    code = (
        "import sys\nprint(sys.path)\n"
        "try:\n    import shim\nexcept ImportError as e:\n    print(e)\n"
    )
    outputs = [
        run(python_of(NEWEST), code, p, cwd=tmp_path, MLX_SHIM="0") for p in (None, str(REPO))
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_chainer_that_executes_the_file_itself_runs_once(python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        print("CHAINER RAN")
        path = {str(REPO / "sitecustomize.py")!r}
        names = dict(__name__="sitecustomize", __file__=path)
        exec(compile(open(path).read(), "x", "exec"), names)
    """)
    )
    out, err, status = run(python, "print('DONE')", f"{tmp_path}{os.pathsep}{REPO}", cwd=tmp_path)
    assert (out, err, status) == (b"CHAINER RAN\nDONE\n", b"", 0)


@pytest.mark.parametrize("python", PYTHONS)
def test_importing_it_again_with_odd_entries_on_sys_path(python, tmp_path):
    code = (
        "import sys\nsys.path.append(None)\n"
        "try:\n    import sitecustomize\nexcept ImportError:\n    print('NONE')\n"
    )
    outputs = [run(python, code, p, cwd=tmp_path) for p in (None, str(REPO))]
    # Debian has a sitecustomize.
    if not python.startswith("/usr"):
        assert outputs[0] == outputs[1]
        assert outputs[0][0] == b"NONE\n"


def strip_addresses(text):
    return b" ".join(word for word in text.split() if not word.startswith(b"0x"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "pip", "--version"),
        ("-m", "pip", "list", "--format=json"),
        ("-c", "pass"),
        ("-c", "import json, sys, sysconfig; print(json.dumps(sysconfig.get_paths()))"),
        ("-m", "json.tool", "--help"),
        ("-m", "venv", "--help"),
    ],
    ids=" ".join,
)
def test_programs_whose_output_is_parsed(arguments, tmp_path):
    """pip, the probing that uv does, and the like."""
    results = [
        subprocess.run(
            [python_of(NEWEST), *arguments],
            capture_output=True,
            check=False,
            cwd=tmp_path,
            env=clean_environ(**environ),
        )
        for environ in ({}, {"PYTHONPATH": str(REPO)})
    ]
    assert len({(r.stdout, r.stderr, r.returncode) for r in results}) == 1


def test_workers_that_multiprocessing_spawns(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        def work(n):
            return n, sorted(m for m in sys.modules if m.split(".")[0] in ("shim", "wrapt"))
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(work, range(4)))
    """)
    )
    results = [
        subprocess.run(
            [python_of(NEWEST), str(program)],
            capture_output=True,
            check=True,
            env=clean_environ(**environ),
        ).stdout
        for environ in ({}, {"PYTHONPATH": str(REPO)})
    ]
    assert results[0] == results[1] == b"[(0, []), (1, []), (2, []), (3, [])]\n"


def test_importtime_lists_neither_shim_nor_wrapt(tmp_path):
    _, err, _ = run(python_of(NEWEST), "pass", str(REPO), "-X", "importtime", cwd=tmp_path)
    names = [line.rsplit("|", 1)[-1].strip() for line in err.decode().splitlines()]
    assert "site" in names
    assert not [n for n in names if n.split(".")[0] in ("shim", "wrapt", "importlib")]


def test_the_file_is_small_and_imports_only_sys_and_os():
    text = (REPO / "sitecustomize.py").read_text()
    assert len(text.splitlines()) <= 60
    top = [line for line in text.splitlines() if line.startswith("import ")]
    assert top == ["import os", "import sys"]
