"""Changes every name of stock that the shim touches, and prints what becomes of the heart.

Each name is changed in every way, on both lines. The output is Markdown.

python tests/bench/drift.py [LINE ...] [--heart] [--name PART] [--kind KIND] [--log] [--stock]

With no argument it also writes docs/names.md.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from kit import harness
from kit.drift import cases, mutate, report
from kit.harness import LINES
from shim.engine.anatomy import ATTRIBUTES

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("line", nargs="*", default=LINES)
parser.add_argument("--name", default="", help="only names with this in them")
parser.add_argument("--kind", choices=mutate.KINDS, action="append", help="only this kind")
parser.add_argument(
    "--log", action="store_true", help="the log of each case that is not as it should be"
)
parser.add_argument("--heart", action="store_true", help="only the names of the heart")
parser.add_argument(
    "--stock", action="store_true", help="without the shim: only whether the changed server serves"
)
given = parser.parse_args()

harness.forking = True
rows = []
begun = time.monotonic()
for line in given.line:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guards = cases.HEART if given.heart else cases.GUARDS
        wanted = cases.cases(cases.touched(line, folder, guards), given.kind or mutate.KINDS)
        bench = cases.Bench(line, folder)
        run = bench.serves if given.stock else bench.run
        rows += bench.run_all(
            [case for case in wanted if given.name in f"{case[0]}.{case[1]}"], run
        )
        if not sys.argv[1:]:
            rows += [row for row in bench.run_each(ATTRIBUTES) if row is not None]
wrong = [row for row in rows if row.wrong]
print(report.table(rows))
print(
    f"\n{len(rows)} cases, {len(wrong)} not as they should be, {time.monotonic() - begun:.0f} s\n"
)
for row in wrong:
    print("*", row)
    if given.log:
        print(row.log[-6000:])
if not sys.argv[1:]:
    report.PAGE.write_text(report.page(rows, time.monotonic() - begun))
sys.exit(bool(wrong))
