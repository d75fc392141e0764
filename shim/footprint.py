"""How much memory this process takes, as its system counts it. No MLX call and no subprocess: some 50 µs.

On Linux the resident set. On macOS the physical footprint, by which the system itself judges a process, and which has
Metal's buffers in it. That part follows Apple's headers and has not been run on a Mac.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RUSAGE_INFO_V0 = 0


class _Usage(ctypes.Structure):
    """rusage_info_v0 of <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16), ("user_time", ctypes.c_uint64), ("system_time", ctypes.c_uint64),
        ("pkg_idle_wkups", ctypes.c_uint64), ("interrupt_wkups", ctypes.c_uint64), ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64), ("resident_size", ctypes.c_uint64), ("phys_footprint", ctypes.c_uint64),
        ("proc_start_abstime", ctypes.c_uint64), ("proc_exit_abstime", ctypes.c_uint64),
    )  # fmt: skip


def footprint() -> int:
    """Bytes. OSError where the system does not tell."""
    if sys.platform == "darwin":
        return _mac()
    return _linux(_STATUS.read_text())


def _linux(status: str) -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise OSError("/proc/self/status has no VmRSS")
    return int(match[1]) * 1024


def _mac() -> int:
    usage = _Usage()
    if ctypes.CDLL(None, use_errno=True).proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage)):
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(usage.phys_footprint)


def shown(size: float) -> str:
    """Bytes as people say them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
