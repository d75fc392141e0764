"""A tiny llama that misbehaves in its forward pass, as real models have: mlx_lm loads it as the folder's `model_file`.

config.json holds {"fault": {"kind": KIND, "trigger": PATH}}: the fault happens once the file PATH exists.
"""

import ctypes
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import llama


class OwnBaseException(BaseException):
    pass


@dataclass
class ModelArgs(llama.ModelArgs):
    fault: dict = field(default_factory=dict)


def misbehave(kind):
    if kind == "sleep":
        time.sleep(10**6)
    elif kind == "hold_gil":
        ctypes.PyDLL(None).sleep(10**6)
    elif kind == "out_of_threads":
        threading.Thread.start = threading._start_new_thread = None
        raise RuntimeError("can't start new thread")
    else:
        exceptions = {
            "RuntimeError": RuntimeError,
            "SystemExit": SystemExit,
            "MemoryError": MemoryError,
            "KeyboardInterrupt": KeyboardInterrupt,
            "OwnBaseException": OwnBaseException,
        }
        raise exceptions[kind]("the model's forward failed")


class Model(llama.Model):
    def __init__(self, args):
        super().__init__(args)
        self._fault = args.fault

    def __call__(self, *args, **kwargs):
        fault = self._fault
        here = mx.distributed.init().rank()
        if Path(fault["trigger"]).exists() and fault.get("rank", here) == here:
            misbehave(fault["kind"])
        if "delay" in fault:
            time.sleep(fault["delay"])
        return super().__call__(*args, **kwargs)
