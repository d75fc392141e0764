"""Keeps docs/troubleshooting.md with the lines that the shim prints: python tests/bench/messages.py

It writes messages that were reworded into their rows. It prints a row for each message that has
none, to be completed and put where it belongs, and each message that is printed no more.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from kit.pages import messages

messages.PAGE.write_text(messages.renewed())
for row in messages.missing():
    print("missing:", row)
for text in messages.left_over():
    print("printed no more:", text)
