"""Writes docs/guards.md from the guards: python tests/bench/guards.py"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from kit.pages import guards_page

guards_page.PAGE.write_text(guards_page.page())
