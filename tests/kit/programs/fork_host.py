"""A fork server: starts stock servers in a second less, since it imports heavy packages once.

The interpreter of a line runs it. A line of stdin is a command in JSON:

    {"id": ..., "file": ..., "environ": {...}, "args": [...], "cwd": ..., "log": ...,
     "bytecode": ...}
        start `python FILE ARGS` as a child, or where "file" is null `python -m mlx_lm ARGS`;
        "bytecode" says whether it may write .pyc files
    {"kill": PID}
        end a child and its process group with SIGKILL

A line of stdout is an answer: {"id": ..., "pid": ...}, and {"pid": ..., "status": ...} when a
child has ended. The child goes on as Python does: it puts PYTHONPATH on sys.path, imports
sitecustomize, then runs the module. At the end of stdin all children are ended.
"""

import builtins
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import sys
import types

# Seconds between two looks for children that have ended.
LOOK = 0.05


def warm():
    """Import the other packages that mlx_lm imports.

    No thread is started. The child itself imports MLX, because of Metal.
    """
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
    # The child imports the one that its path has.
    sys.modules.pop("sitecustomize", None)
    assert not any(name.split(".")[0] in ("mlx_lm", "shim", "wrapt") for name in sys.modules)
    gc.collect()
    gc.freeze()


def say(**answer):
    os.write(1, json.dumps(answer).encode() + b"\n")


def serve():
    """Fork at each command.

    Returns in the child, with the command. Ends the process when stdin ends.
    """
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
        try:
            os.killpg(pid, signal.SIGKILL)
        # It has not made its group yet.
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)


def has_ended(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        say(pid=pid, status=os.waitstatus_to_exitcode(status))
    return bool(ended)


def become(command):
    """Make this process like one that Python has just started."""
    os.setsid()
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    os.close(log)
    os.close(nothing)
    os.chdir(command["cwd"])
    # PYTHONUNBUFFERED.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(command["environ"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    program = [command["file"]] if command["file"] else ["-m", "mlx_lm"]
    sys.argv = [program[0], *command["args"]]
    sys.orig_argv = [sys.executable, *program, *command["args"]]
    sys.dont_write_bytecode = not command["bytecode"]
    importlib.invalidate_caches()
    try:
        import sitecustomize  # noqa: F401
    except ImportError:
        pass
    # As Python does, once site has run.
    file = command["file"]
    sys.path.insert(0, str(pathlib.Path(file).parent) if file else command["cwd"])


def run(file):
    """As `python FILE` does: in a module of its own that is __main__."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=file, __cached__=None, __annotations__={})
    exec(compile(pathlib.Path(file).read_bytes(), file, "exec"), main.__dict__)


# The folder of this file.
del sys.path[0]
warm()
say(ready=True)
started = serve()
become(started)
if started["file"]:
    run(started["file"])
else:
    runpy.run_module("mlx_lm", run_name="__main__", alter_sys=True)
