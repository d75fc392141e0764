"""Writes the order of wrappers into docs/how-it-works.md: python tests/bench/wrapping.py"""

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from kit.pages import wrapping

page = wrapping.PAGE.read_text()
head, _, rest = page.partition(wrapping.BEGIN)
tail = rest.partition(wrapping.END)[2]
with tempfile.TemporaryDirectory() as folder:
    new = head + wrapping.BEGIN + wrapping.table(Path(folder)) + wrapping.END + tail
wrapping.PAGE.write_text(new)
print("as it was" if new == page else f"{wrapping.PAGE} is written again")
