"""Makes the table of the wrappers of each function of stock, in their order.

It asks a child in which every guard is at work.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from kit.harness import LINES, REPO, clean_environ, python_of

PAGE = REPO / "docs" / "how-it-works.md"
BEGIN, END = (
    "<!-- the order of wrappers: tests/bench/wrapping.py writes it -->\n",
    "<!-- end of the order -->\n",
)

_LISTS = """\
import json, mlx_lm.server, sys
from shim.core import patch
json.dump(patch.layers, sys.stdout)
"""


def every_setting(folder: Path) -> dict[str, str]:
    """An environment that asks for each guard that is off by default, with mild limits."""
    key = folder / "key"
    key.touch(0o600)
    key.write_text("a key that no client knows")
    much = (
        "MAX_PROMPT_TOKENS",
        "MAX_TOKENS",
        "MAX_CONTEXT",
        "MAX_KV_SIZE",
        "MAX_INFLIGHT",
        "RECYCLE_REQUESTS",
    )
    return {f"MLX_SHIM_{name}": "100000" for name in much} | {
        "MLX_SHIM_API_KEY_FILE": str(key),
        "MLX_SHIM_ALLOWED_MODELS": "x",
        "MLX_SHIM_WIRED": "off",
        "MLX_SHIM_MEMORY_LIMIT": "1G",
        "MLX_SHIM_CACHE_LIMIT": "1G",
        "MLX_SHIM_MEMORY_SOFT": "80%",
        "MLX_SHIM_MEMORY_HARD": "90%",
        "MLX_SHIM_STATE_DIR": str(folder),
        "MLX_SHIM_CRASH_LOOP": "1",
        "MLX_SHIM_SELF_CHECK": "1",
        "NOTIFY_SOCKET": str(folder / "none"),
    }


def layers(line: str, folder: Path) -> dict[str, list[str]]:
    """By function of stock: who has wrapped it, outermost first. Repeats in a row count once."""
    environ = clean_environ(**every_setting(folder), PYTHONPATH=str(REPO))
    answer = subprocess.run(
        [python_of(line), "-c", _LISTS], env=environ, capture_output=True, check=True, text=True
    )
    found = {}
    for function, wrappers in json.loads(answer.stdout).items():
        outermost_first = wrappers[::-1]
        found[function] = [
            w for n, w in enumerate(outermost_first) if n == 0 or w != outermost_first[n - 1]
        ]
    return found


def table(folder: Path) -> str:
    """The Markdown table of each function with more than one wrapper, by line where they differ."""
    by_line = {line: layers(line, folder) for line in LINES}
    rows = []
    for function in sorted({name for found in by_line.values() for name in found}):
        orders = {
            line: found[function]
            for line, found in by_line.items()
            if len(found.get(function, [])) > 1
        }
        for order in sorted({tuple(order) for order in orders.values()}):
            lines = [line for line in orders if tuple(orders[line]) == order]
            where = "" if len(lines) == len(by_line) else f" ({', '.join(lines)})"
            rows.append(f"| `{function}`{where} | {' > '.join(f'`{name}`' for name in order)} |")
    return (
        "\n".join(["| function of stock | who wraps it, outermost first |", "|---|---|", *rows])
        + "\n"
    )


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
