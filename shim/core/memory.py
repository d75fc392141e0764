"""Measures memory in bytes, of this process and of the machine.

No function here starts a process; a call takes about 50 µs. The macOS parts follow Apple's headers
and have not been run on a Mac.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

# A level of kern.memorystatus_vm_pressure_level; 1 is normal, 2 is a warning.
CRITICAL_PRESSURE = 4

_HOST_VM_INFO64 = 4
_PROCESS_STATUS = Path("/proc/self/status")
_RUSAGE_INFO_V0 = 0


class _Usage(ctypes.Structure):
    """rusage_info_v0 of <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("pkg_idle_wkups", ctypes.c_uint64),
        ("interrupt_wkups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("proc_start_abstime", ctypes.c_uint64),
        ("proc_exit_abstime", ctypes.c_uint64),
    )


class _Statistics(ctypes.Structure):
    """vm_statistics64 of mach/vm_statistics.h. The uint32 fields count pages."""

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
    """Return the memory of this process, as the system counts it.

    On Linux this is the resident set. On macOS it is the physical footprint: it includes Metal's
    buffers, and the system itself judges processes by it. Raises OSError if the system does not
    give the figure.
    """
    if sys.platform == "darwin":
        return _footprint_on_macos()
    return _resident(_PROCESS_STATUS.read_text())


def total() -> int | None:
    """Return the memory of the machine, or None if the system does not give it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def available() -> int | None:
    """Return the memory that can be used without swapping, or None if it is not known."""
    if sys.platform == "linux":
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
        return int(found[1]) * 1024 if found else None
    if sys.platform == "darwin":
        return _available_on_macos()
    return None


def _available_on_macos() -> int | None:
    """Return the free and inactive pages, in bytes."""
    system = ctypes.CDLL(None)
    system.mach_host_self.restype = ctypes.c_uint32
    pages = _Statistics()
    count = ctypes.c_uint32(ctypes.sizeof(pages) // 4)
    failed = system.host_statistics64(
        ctypes.c_uint32(system.mach_host_self()),
        _HOST_VM_INFO64,
        ctypes.byref(pages),
        ctypes.byref(count),
    )
    return None if failed else int(pages.free + pages.inactive) * resource.getpagesize()


class Usage(NamedTuple):
    """The memory of a process that uses MLX, in bytes."""

    # In arrays.
    active: int
    # In freed arrays that MLX keeps for reuse.
    pool: int
    # As the system counts it.
    footprint: int

    @property
    def counted(self) -> int:
        """The larger of MLX's count and the system's: neither is complete (mlx-lm 1807)."""
        return max(self.active + self.pool, self.footprint)


def usage(mx: Any) -> Usage:
    """Read the usage from `mlx.core` (`mx`) and from the system.

    Reading MLX's two figures does not wait for MLX's computations.
    """
    return Usage(mx.get_active_memory(), mx.get_cache_memory(), footprint())


def at_rest(mx: Any) -> Usage:
    """Give back MLX's pool and malloc's free memory, and return what is still in use.

    Call this in the generation thread only: another thread would wait for it.
    """
    mx.clear_cache()
    give_back()
    return usage(mx)


def is_critical() -> bool:
    """Whether macOS reports critical memory pressure. Always False on Linux."""
    if sys.platform != "darwin":
        return False
    level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    failed = ctypes.CDLL(None).sysctlbyname(
        name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return not failed and level.value >= CRITICAL_PRESSURE


def give_back() -> None:
    """Make malloc return its free memory to the system. Without this call malloc may keep it."""
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":
        libc.malloc_zone_pressure_relief(ctypes.c_void_p(), ctypes.c_size_t(0))
    elif hasattr(libc, "malloc_trim"):
        # This libc is glibc.
        libc.malloc_trim(ctypes.c_size_t(0))


def _resident(status: str) -> int:
    match = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise OSError("/proc/self/status has no VmRSS")
    return int(match[1]) * 1024


def _footprint_on_macos() -> int:
    usage = _Usage()
    if ctypes.CDLL(None, use_errno=True).proc_pid_rusage(
        os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage)
    ):
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(usage.phys_footprint)


def format_bytes(size: float) -> str:
    """Return a number of bytes as text for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
