"""Bytes of memory, of this process and of the machine. None where it cannot be told. Nothing here asks MLX."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

_HOST_VM_INFO64 = 4


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


def footprint() -> int | None:
    """What this process holds now: resident memory on Linux."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return None


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
