"""Programs that use the stock server in ways of their own.

The shim once killed each, or left it unguarded.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import signal
import subprocess
import textwrap

import pytest

from kit.harness import (
    KILLER,
    NEWEST,
    REPO,
    VENVS,
    Server,
    clean_environ,
    free_port,
    python_of,
    taken_port,
)

pytestmark = pytest.mark.usefixtures("killable")


IN_A_THREAD = """
    import threading
    from mlx_lm.server import main
    threading.Thread(target=main).start()
"""
OWN_LOOP = """
    import mlx_lm.server as server
    stock = vars(server.ResponseGenerator)["_generate"].__wrapped__
    class Own(server.ResponseGenerator):
        # The guard's wrapper is on the class above.
        def _generate(self):
            stock(self)
    server.ResponseGenerator = Own
    server.main()
"""
OWN_LOAD = """
    import mlx_lm.server as server
    class Own(server.ModelProvider):
        def load_default(self):
            self.load("default_model", None, "default_model")
    server.ModelProvider = Own
    server.main()
"""
UNPRINTABLE = """
    import mlx_lm.server as server
    class Unprintable(Exception):
        def __str__(self):
            raise ValueError("no text")
    stock = server.BatchGenerator.insert_segments
    def insert_segments(self, **options):
        try:
            return stock(self, **options)
        except Exception:
            raise Unprintable from None
    server.BatchGenerator.insert_segments = insert_segments
    server.main()
"""
SHIM_WITHOUT_SPEC = """
    import sys, types
    sys.modules["shim"] = types.ModuleType("shim")
    from mlx_lm.server import main
    main()
"""


@pytest.mark.parametrize(
    "program", [IN_A_THREAD, OWN_LOOP, OWN_LOAD, UNPRINTABLE, SHIM_WITHOUT_SPEC]
)
def test_they_serve_and_a_death_is_70(line, tiny, tmp_path, program):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    with Server(line, tiny, tmp_path / "log", entry=(str(path),)) as server:
        server.ready().send_and_leave(KILLER)
        assert server.wait_exit(30) == 70
        assert sum("fatal:" in x for x in server.shim_lines()) == 1


TWO = """
    import time
    import mlx_lm.server as server
    class Args:
        model = None; adapter_path = None; draft_model = None; trust_remote_code = False
        chat_template = ""; pipeline = False; use_default_chat_template = False
        prompt_cache_bytes = None; kv_bits = None
    old, new = (
        server.ResponseGenerator(server.ModelProvider(Args()), server.LRUPromptCache(10))
        for _ in range(2)
    )
    time.sleep(0.5)
    old.stop_and_join()
    time.sleep(0.5)
    new.stop_and_join()
    print("BOTH STOPPED")
"""


def test_one_of_two_generators_may_stop(line, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(TWO))
    with Server(line, None, tmp_path / "log", entry=(str(path),)) as server:
        assert server.wait_exit() == 0, server.text()
        assert "BOTH STOPPED" in server.text()


def test_an_mlx_lm_without_metadata(tiny, tmp_path):
    """Run from a source checkout, which has no version: it serves."""
    (site,) = (VENVS / NEWEST).glob("lib/python3*/site-packages")
    folder = tmp_path / "site"
    folder.mkdir()
    for item in site.iterdir():
        if not item.name.startswith("mlx_lm-"):
            (folder / item.name).symlink_to(item)
    bare = os.path.realpath(python_of(NEWEST))
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{folder}"}
    with Server(
        NEWEST, tiny, tmp_path / "log", entry=(bare, "-m", "mlx_lm", "server"), environ=environ
    ) as server:
        server.ready()
        assert "mlx-lm unknown" in server.text()


def test_an_mlx_lm_of_byte_code_only(tiny, tmp_path):
    (site,) = (VENVS / NEWEST).glob("lib/python3*/site-packages")
    folder = tmp_path / "site"
    shutil.copytree(
        site / "mlx_lm", folder / "mlx_lm", ignore=shutil.ignore_patterns("__pycache__")
    )
    for source in folder.rglob("*.py"):
        py_compile.compile(str(source), cfile=f"{source}c", doraise=True)
        source.unlink()
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{folder}"}
    with Server(
        NEWEST, tiny, tmp_path / "log", entry=("-m", "mlx_lm.server"), environ=environ
    ) as server:
        server.ready().send_and_leave(KILLER)
        assert server.wait_exit(30) == 70


@pytest.mark.parametrize(
    "loader",
    [
        "class L:\n    __slots__ = ('s',)\n    def __init__(self): self.s = S\n",
        "class L:\n    s = S\n    def __new__(cls): return cls\n",
    ],
    ids=["slots", "a class"],
)
def test_loaders_that_cannot_be_written_to(loader, tmp_path):
    methods = (
        "    {0}def create_module({1}, spec): return None\n"
        "    {0}def exec_module({1}, module): {1}.s.exec_module(module)\n"
    )
    decorated = methods.format("@classmethod\n    " if "__new__" in loader else "", "self")
    code = textwrap.dedent("""
        import sys, importlib.machinery as m
        class F:
            def find_spec(self, name, path=None, target=None):
                global S
                if name != "mlx_lm": return None
                spec = m.PathFinder.find_spec(name, path)
                S = spec.loader
                names = {"S": S}
                exec(TEXT, names)
                spec.loader = names["L"]()
                return spec
        sys.meta_path.append(F())
        sys.meta_path[:] = [f for f in sys.meta_path if f is not m.PathFinder] + [m.PathFinder]
        import mlx_lm
        print("imported", any(k.endswith("shim.boot") for k in sys.modules))
    """)
    child = subprocess.run(
        [python_of(NEWEST), "-c", f"TEXT = {loader + decorated!r}\n{code}"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=clean_environ(PYTHONPATH=str(REPO)),
    )
    assert (child.stdout, child.stderr, child.returncode) == (b"imported True\n", b"", 0)


def test_a_name_in_the_environment_that_is_no_utf8(tiny, tmp_path):
    environ = {os.fsdecode(b"MLX_SHIM_\xff"): "1"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        server.ready()
        assert any("MLX_SHIM_\\udcff is not a setting" in x for x in server.shim_lines())


def test_a_model_name_that_is_no_utf8(tmp_path):
    with Server(NEWEST, os.fsdecode(b"/nonexistent\xff"), tmp_path / "log") as server:
        assert server.wait_exit() == 78
        assert any("fatal:" in x for x in server.shim_lines())


@pytest.mark.parametrize("host", ["..", "no.such.host.invalid"])
def test_a_host_that_cannot_be_bound_is_71(tiny, tmp_path, host):
    with Server(NEWEST, tiny, tmp_path / "log", args=("--host", host)) as server:
        assert server.wait_exit() == 71


BUSY = {
    "a sys.excepthook that hangs": (
        "import sys, time\nsys.excepthook = lambda *args: time.sleep(10**6)"
    ),
    "an executor that never ends": (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor().submit(time.sleep, 10**6)"
    ),
    "main in a thread": (
        "import threading, time\nfrom mlx_lm.server import main\n"
        "threading.Thread(target=main).start()\ntime.sleep(10**6)"
    ),
}


@pytest.mark.parametrize("what", BUSY)
def test_port_taken_while_main_is_alive_by_name_only(tiny, tmp_path, what):
    path = tmp_path / "program.py"
    path.write_text(f"{BUSY[what]}\nfrom mlx_lm.server import main\nmain()\n")
    with (
        taken_port() as port,
        Server(NEWEST, tiny, tmp_path / "log", entry=(str(path),), port=port) as server,
    ):
        assert server.wait_exit(60) == 71


def test_a_program_that_tries_the_next_port_is_let(tiny, tmp_path):
    """It handled the error: main is alive, and at work."""
    path = tmp_path / "program.py"
    other = free_port()
    path.write_text(
        textwrap.dedent(f"""
        import sys, time
        from mlx_lm.server import main
        try:
            main()
        except OSError:
            time.sleep(2)
            sys.argv[sys.argv.index("--port") + 1] = "{other}"
            main()
    """)
    )
    with (
        taken_port() as port,
        Server(NEWEST, tiny, tmp_path / "log", entry=(str(path),), port=port) as server,
    ):
        server.port = other
        server.ready()


def test_ctrl_c_while_the_shim_is_loaded_ends_the_process(tiny, tmp_path):
    """The import of wrapt is where most of that time goes."""
    (tmp_path / "wrapt.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(1)\n"
    )
    environ = {"PYTHONPATH": f"{REPO}{os.pathsep}{tmp_path}"}
    with Server(NEWEST, tiny, tmp_path / "log", environ=environ) as server:
        assert server.wait_exit(60) == -signal.SIGINT
        assert "KeyboardInterrupt" in server.text()


TWO_SERVERS = """
import os
from mlx_lm import server
providers = []
stock_run, server.run = server.run, lambda host, port, provider, **_: providers.append(provider)
server.main()
description = server.ModelDescription("default_model", "default_model", None)
sampling = server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1)
logits = server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20)
for n in range(2):
    generator = server.ResponseGenerator(providers[0], server.LRUPromptCache(10))
    request = server.CompletionRequest("text", f"server {n}", [], None, None)
    arguments = server.GenerationArguments(
        description, sampling, logits, [], 4, 3, False, -1, None, None
    )
    _, responses = generator.generate(request, arguments)
    print("tokens", len(list(responses)), flush=True)
    generator.stop_and_join()
# mlx's own teardown may abort.
os._exit(0)
"""


def test_a_program_that_stops_a_server_may_start_another(line, tiny, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TWO_SERVERS)
    ran = subprocess.run(
        [python_of(line), str(program), "--model", str(tiny)],
        env=clean_environ(PYTHONPATH=str(REPO)),
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["tokens", "4"] * 2, ran.stderr
    assert ran.returncode == 0, ran.stderr
