"""Writes the rows of docs/environment.md from settings.py: python tests/bench/environment.py

A setting that is new has to be put into one of the groups by hand: this says which.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from kit.pages import environment

environment.PAGE.write_text(environment.page())
for variable in environment.rows().keys() - dict(environment.written()).keys():
    print("missing:", environment.rows()[variable])
