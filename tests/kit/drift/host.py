"""A fork server. It starts stock servers a second faster: it imports the heavy modules only once.

The interpreter of a line runs it. A line of stdin is a command in JSON. To start mlx_lm.server as a
child, and to end a child with SIGKILL:

    {"id": ..., "path": [...], "environ": {...}, "args": [...], "log": ...}
    {"kill": PID}

A line of stdout is an answer: {"id": ..., "pid": ...}, and {"pid": ..., "status": ...} when a child
has ended. The child goes on like Python with PYTHONPATH=path: it imports sitecustomize from there,
then runs `-m mlx_lm server`. When stdin ends, it ends all children.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys

# Seconds between two looks for children that have ended.
LOOK = 0.05


def warm():
    """Import what mlx_lm imports, without threads. The child imports MLX itself, for Metal."""
    for name in (
        "huggingface_hub",
        "jinja2",
        "numpy",
        "tokenizers",
        "transformers.utils.chat_template_utils",
    ):
        importlib.import_module(name)
    transformers = importlib.import_module("transformers")
    _ = (
        transformers.AutoTokenizer,
        transformers.PreTrainedTokenizer,
        transformers.PreTrainedTokenizerFast,
    )
    # The child imports the one on its own path.
    sys.modules.pop("sitecustomize", None)
    assert not any(name.split(".")[0] in ("mlx_lm", "shim", "wrapt") for name in sys.modules)
    gc.collect()
    gc.freeze()


def say(**answer):
    os.write(1, json.dumps(answer).encode() + b"\n")


def serve():
    """Fork at each command. Returns in the child, with the command. Exits when stdin ends."""
    children = set()
    rest = b""
    while True:
        if select.select([0], [], [], LOOK)[0]:
            data = os.read(0, 65536)
            if not data:
                end(children)
                os._exit(0)
            *lines, rest = (rest + data).split(b"\n")
            for command in map(json.loads, lines):
                if "kill" in command:
                    end(children & {command["kill"]})
                    continue
                pid = os.fork()
                if pid == 0:
                    return command
                children.add(pid)
                say(id=command["id"], pid=pid)
        children -= {pid for pid in children if has_ended(pid)}


def end(children):
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def has_ended(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        say(pid=pid, status=os.waitstatus_to_exitcode(status))
    return bool(ended)


def become(command):
    """Make this child like a process that Python has just started."""
    os.setsid()
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(log)
    os.close(nothing)
    sys.stdout.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(command["environ"])
    sys.path[:0] = command["path"]
    sys.argv = ["-m", *command["args"]]
    sys.dont_write_bytecode = True
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        pass


# The folder of this file.
del sys.path[0]
warm()
say(ready=True)
become(serve())
runpy.run_module("mlx_lm", run_name="__main__", alter_sys=True)
