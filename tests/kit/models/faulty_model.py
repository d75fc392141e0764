"""A tiny llama that misbehaves in its forward pass, like real models have done.

mlx_lm loads it as the folder's `model_file`. config.json holds {"fault": {"kind": KIND, "trigger":
PATH, ...}}: the fault happens once the file PATH exists. `delay`, `prefill_delay` and `load_delay`
are seconds. The model waits for none of them once the file `hurried` exists. With `once` the file
PATH holds the kind, and the model removes it. With `count` each forward pass adds a byte to the
file `counted`. Each load adds a byte to the file `loaded`.
"""

import ctypes
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import llama

# The token of the end of text.
END = 256


class OwnBaseException(BaseException):
    pass


@dataclass
class ModelArgs(llama.ModelArgs):
    fault: dict = field(default_factory=dict)


def misbehave(kind, trigger):
    if kind == "sleep":
        time.sleep(10**6)
    elif kind == "sleep_while_triggered":
        while trigger.exists():
            time.sleep(0.05)
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
        with Path(self._fault["loaded"]).open("a") as loaded:
            loaded.write(".")
        deadline = time.monotonic() + self._fault.get("load_delay", 0)
        while time.monotonic() < deadline and not self._hurried:
            time.sleep(0.02)

    @property
    def _hurried(self):
        return Path(self._fault["hurried"]).exists()

    def __call__(self, inputs, *args, **kwargs):
        fault = self._fault
        here = mx.distributed.init().rank()
        if Path(fault["trigger"]).exists() and fault.get("rank", here) == here:
            trigger = Path(fault["trigger"])
            kind = fault["kind"]
            if fault.get("once"):
                kind = trigger.read_text()
                trigger.unlink()
            misbehave(kind, trigger)
        if fault.get("count"):
            with Path(fault["counted"]).open("a") as counted:
                counted.write(".")
        delay = (
            fault.get("delay", 0)
            if inputs.shape[1] == 1
            else fault.get("prefill_delay", fault.get("delay", 0))
        )
        if delay and not self._hurried:
            time.sleep(delay)
        logits = super().__call__(inputs, *args, **kwargs)
        # It never ends by itself.
        return mx.where(mx.arange(logits.shape[-1]) == END, -1e9, logits)
