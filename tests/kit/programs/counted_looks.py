"""Runs the stock server and says on stderr, in a line each, what looks at memory ("LOOK thread") and what is started ("START")."""

import sys
import threading

import mlx_lm.server

(memory,) = [module for name, module in sys.modules.items() if name.endswith("shim.core.memory")]
usage = memory.usage


def looked(mx):
    sys.stderr.write(f"LOOK {threading.current_thread().name}\n")
    return usage(mx)


def audited(event, _):
    if event in (
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        "os.system",
    ):
        sys.stderr.write(f"START {event}\n")


memory.usage = looked
sys.addaudithook(audited)
mlx_lm.server.main()
