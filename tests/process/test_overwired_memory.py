"""The memory that stock wires, with a stand-in for Metal, which the test machines do not have.

The real server asks it to wire, and the guard holds it back.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from kit.harness import VENVS, Inconclusive, Server, wait_until

GIB = 2**30
RECOMMENDED = 48 * GIB

# Metal's part in mlx.core, before any module has imported it. It writes the requests to a file.
METAL = """
import json, pathlib, sys
import mlx.core as mx
said, limit = pathlib.Path(sys.argv.pop(1)), [0]
def wire(size):
    before, limit[0] = limit[0], size
    with said.open("a") as f:
        f.write(json.dumps(size) + chr(10))
    return before
info = mx.device_info
mx.device_info = lambda *a: info(*a) | {"max_recommended_working_set_size": RECOMMENDED}
mx.metal.is_available = lambda: True
mx.set_wired_limit = wire
import mlx_lm.server
import mlx_lm.generate
mlx_lm.server.main()
""".replace("RECOMMENDED", str(RECOMMENDED))


def asked(line, tiny, folder, wired):
    """The sizes that Metal was asked to wire, in order.

    By a start, a request in a batch, and one that is served alone.
    """
    program, said = folder / "metal.py", folder / "said"
    program.write_text(METAL)
    environ = {"MLX_SHIM": "0"} if wired is None else {"MLX_SHIM_WIRED": wired}
    with Server(
        line, tiny, folder / "log", entry=(str(program), str(said)), environ=environ
    ) as server:
        server.ready()
        assert server.post({"prompt": "batch", "max_tokens": 2})[0] == 200
        assert server.post({"prompt": "alone", "max_tokens": 2, "seed": 1})[0] == 200
        state = server.get("/health")[1].get("guards", {}).get("overwired_memory")
        return [json.loads(text) for text in said.read_text().splitlines()], server.text(), state


@pytest.mark.guard("overwired_memory")
@pytest.mark.parametrize(
    ("wired", "most"), [("off", 0), ("3G", 3 * GIB), ("model+4G", None), ("auto", 0)]
)
def test_it_is_held_at_every_call(wired, most, line, tiny, tmp_path):
    sizes, log, state = asked(line, tiny, tmp_path, wired)
    assert len(sizes) >= 3
    if most is None:
        assert sizes[0] == 0, "there is no model yet"
        model = (tiny / "model.safetensors").stat().st_size
        assert max(sizes) == pytest.approx(4 * GIB + model, abs=20_000)
    else:
        assert max(sizes) == most
    assert state == "active"
    assert "rather than 48.00 GiB (MLX_SHIM_WIRED)" in log


@pytest.mark.control("overwired_memory")
@pytest.mark.parametrize("wired", [None, "stock"])
def test_control_stock_wires_all(wired, line, tiny, tmp_path):
    sizes, *_ = asked(line, tiny, tmp_path, wired)
    if max(sizes) != RECOMMENDED or sizes.count(RECOMMENDED) < 3:
        raise Inconclusive(f"asked for {sizes}")


@pytest.mark.guard("overwired_memory")
def test_no_call_site_is_unknown(line):
    """All code in mlx_lm that calls it is guarded, or trains."""
    package = next((VENVS / line / "lib").glob("python3*")) / "site-packages" / "mlx_lm"
    sites = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.search(r"\bset_wired_limit$", ast.unparse(node.func))
    }
    assert sites - {"server.py", "generate.py", "utils.py"} <= {"quant/dwq.py", "tuner/trainer.py"}
    assert len(sites) >= 2, "the pattern finds them"


@pytest.mark.guard("overwired_memory")
def test_who_else_uses_mlx_is_left_alone(line, tiny, tmp_path):
    """A program's own call, through mlx.core itself, is not held."""
    program = tmp_path / "own.py"
    program.write_text(
        METAL.replace(
            "mlx_lm.server.main()", f"mx.set_wired_limit({5 * GIB}); mlx_lm.server.main()"
        )
    )
    said = tmp_path / "said"
    with Server(
        line,
        tiny,
        tmp_path / "log",
        entry=(str(program), str(said)),
        environ={"MLX_SHIM_WIRED": "off"},
    ) as server:
        server.ready()
        assert json.loads(said.read_text().splitlines()[0]) == 5 * GIB


@pytest.mark.guard("hoarded_buffers")
def test_mlx_has_its_own_limits(line, tiny, tmp_path):
    """MLX_SHIM_CACHE_LIMIT and _MEMORY_LIMIT arrive in mlx; unset, nothing is called.

    MLX takes more than the latter all the same.
    """
    program = Path(tmp_path / "limits.py")
    program.write_text(
        "import sys, mlx.core as mx, mlx_lm.server, atexit\n"
        "made = mlx_lm.server.ResponseGenerator.__init__\n"
        "def init(self, *a, **k):\n"
        "    made(self, *a, **k)\n"
        "    cache, memory = mx.set_cache_limit(1), mx.set_memory_limit(1)\n"
        "    mx.set_cache_limit(cache); mx.set_memory_limit(memory)\n"
        "    sys.stderr.write(f'LIMITS {cache} {memory}\\n')\n"
        "mlx_lm.server.ResponseGenerator.__init__ = init\n"
        "mlx_lm.server.main()\n"
    )
    found, told = {}, {}
    for name, environ in {
        "set": {"MLX_SHIM_CACHE_LIMIT": "16M", "MLX_SHIM_MEMORY_LIMIT": "3G"},
        "unset": {},
        "less": {
            "MLX_SHIM_CACHE_LIMIT": "0",
            "MLX_SHIM_MEMORY_LIMIT": "65536",
            "MLX_SHIM_MEMORY_SOFT": "90%",
        },
    }.items():
        with Server(line, tiny, tmp_path / name, entry=(str(program),), environ=environ) as server:
            log = server.ready().text()
            found[name] = [int(n) for n in re.search(r"LIMITS (\d+) (\d+)", log).groups()]
            assert ("mx.set_cache_limit is" in log) is (name != "unset")
            status, answer = server.post({"prompt": "x" * 300, "max_tokens": 8, "temperature": 0})
            assert status == 200
            told[name] = answer["choices"][0]["text"]
            if name == "less":
                assert wait_until(lambda: "memory" in server.get("/health")[1], 10)
                assert server.get("/health")[1]["memory"]["active"] > 65536, (
                    "the model alone is more"
                )
    assert len(set(told.values())) == 1, told
    assert found["less"] == [0, 65536]
    assert found["set"] == [16 << 20, 3 << 30]
    if found["unset"][0] <= found["set"][0] or found["unset"][1] <= found["set"][1]:
        raise Inconclusive(f"mlx's own limits are {found['unset']}")
