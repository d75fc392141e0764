"""Runs the stock server, and takes as many bytes as a file says, as long as the file exists.

`memory_hog.py FILE GRACE ARGUMENTS`: exhausted_memory waits GRACE seconds before it has the process
replaced.
"""

import contextlib
import pathlib
import sys
import threading
import time

import mlx_lm.server

trigger, grace = pathlib.Path(sys.argv.pop(1)), float(sys.argv.pop(1))
for name, module in sys.modules.items():
    if name.endswith(".guards.exhausted_memory.limit"):
        module.GRACE = grace


def hog():
    held = b""
    while True:
        time.sleep(0.05)
        size = 0
        with contextlib.suppress(FileNotFoundError):
            size = int(trigger.read_text() or 0)
        if len(held) != size:
            held = b"x" * size


threading.Thread(target=hog, daemon=True).start()
mlx_lm.server.main()
