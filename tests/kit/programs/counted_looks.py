"""Runs the stock server and writes a line to stderr for each event.

"LOOK thread": that thread looks at memory. "START event": a process is started.
"""

import sys
import threading

import mlx_lm.server

(memory,) = [module for name, module in sys.modules.items() if name.endswith("shim.core.memory")]
usage = memory.usage


def look(mx):
    sys.stderr.write(f"LOOK {threading.current_thread().name}\n")
    return usage(mx)


def audit(event, _):
    if event in (
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        "os.system",
    ):
        sys.stderr.write(f"START {event}\n")


memory.usage = look
sys.addaudithook(audit)
mlx_lm.server.main()
