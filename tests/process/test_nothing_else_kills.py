"""Only the death of the generation thread ends the process. Errors that look like it do not."""

from __future__ import annotations

import textwrap

import pytest

from kit.harness import Server, wait_until

pytestmark = pytest.mark.usefixtures("killable")

PROGRAM = """
    import importlib.util, pathlib, sys, threading
    from mlx_lm.server import main

    def benign():
        raise RuntimeError("benign")

    def worker():
        sys.exit(3)

    other = pathlib.Path(__file__).with_name("other") / "server.py"
    other.parent.mkdir()
    other.write_text("def _generate():\\n    raise RuntimeError('another _generate')\\n")
    spec = importlib.util.spec_from_file_location("other.server", other)
    namesake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namesake)

    def deaths():
        for thread in (
            threading.Thread(target=benign),
            threading.Thread(target=benign, name="Thread-7 (_generate)"),
            threading.Thread(target=benign, name="Thread-1 (_run_generate)"),
            threading.Thread(target=namesake._generate),
            threading.Thread(target=worker),
        ):
            thread.start()
            thread.join()
        print("ALL DEAD", flush=True)

    threading.Timer(1, deaths).start()
    main()
"""

# Each makes a handler thread raise, in stock, before the request reaches the generation thread.
HANDLER_KILLERS = [b"\xff\xfe", b'{"prompt": "x", "logit_bias": {"1": null}}', b"[" * 100_000]


@pytest.mark.guard("generation_death")
def test_other_threads_may_die(line, tiny, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with Server(line, tiny, tmp_path / "log", entry=(str(program),)) as server:
        assert wait_until(lambda: "ALL DEAD" in server.text(), 60), server.text()
        assert server.text().count("RuntimeError: benign") == 3, (
            "their tracebacks are printed as ever"
        )
        server.ready()
        for body in HANDLER_KILLERS:
            try:
                server.post(body, timeout=10)
            except OSError:
                pass
        assert "Traceback" in server.text()
        assert server.post({"prompt": "x", "max_tokens": 2})[0] == 200
        assert not any("fatal" in x for x in server.shim_lines())
