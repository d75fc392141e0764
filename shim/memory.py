"""Bytes of memory, of this process and of the machine. Nothing here asks MLX, or starts a process: some 50 µs.

The macOS parts follow Apple's headers and have not been run on a Mac.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

_HOST_VM_INFO64 = 4
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


class _Statistics(ctypes.Structure):
    """vm_statistics64 of mach/vm_statistics.h: pages, but for the uint64 counters."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        ("counters", ctypes.c_uint64 * 9),
        ("purgeable", ctypes.c_uint32),
        ("speculative", ctypes.c_uint32),
        ("more_counters", ctypes.c_uint64 * 4),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "external", "internal")),
        ("compressed", ctypes.c_uint64),
    )


def footprint() -> int:
    """What this process holds, as its system counts it. OSError where that does not tell.

    On Linux the resident set. On macOS the physical footprint, by which the system itself judges a process, and which
    has Metal's buffers in it.
    """
    if sys.platform == "darwin":
        return _footprint_on_macos()
    return _resident(_STATUS.read_text())


def total() -> int | None:
    """What the machine has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def available() -> int | None:
    """What could be used without swapping."""
    if sys.platform == "linux":
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    if sys.platform == "darwin":
        return _available_on_macos()
    return None


def _available_on_macos() -> int | None:
    """Free and inactive pages, as Activity Monitor's kin count them. Written from Apple's headers, not run on a Mac."""
    system = ctypes.CDLL(None)
    system.mach_host_self.restype = ctypes.c_uint32
    pages = _Statistics()
    count = ctypes.c_uint32(ctypes.sizeof(pages) // 4)
    failed = system.host_statistics64(
        ctypes.c_uint32(system.mach_host_self()), _HOST_VM_INFO64, ctypes.byref(pages), ctypes.byref(count)
    )
    return None if failed else int(pages.free + pages.inactive) * resource.getpagesize()


def _resident(status: str) -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise OSError("/proc/self/status has no VmRSS")
    return int(match[1]) * 1024


def _footprint_on_macos() -> int:
    usage = _Usage()
    if ctypes.CDLL(None, use_errno=True).proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage)):
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(usage.phys_footprint)


def shown(size: float) -> str:
    """Bytes as people say them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
