"""The calls of macOS, with stand-ins: their arguments, how their output is read, their failures.

They follow Apple's headers: libproc.h, sys/resource.h, mach/mach_host.h, malloc/malloc.h. Not
verified on a Mac.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource

import pytest

from shim.core import memory

# A mach port.
HOST = 1795


class System:
    """The functions of libSystem. `calls` counts them, and each returns `status`."""

    def __init__(self):
        self.calls = []
        self.status = 0

        def mach_host_self():
            self.calls.append("mach_host_self")
            return HOST

        # One object, because the shim sets its restype.
        self.mach_host_self = mach_host_self

    def proc_pid_rusage(self, pid, flavor, buffer):
        self.calls.append("proc_pid_rusage")
        assert pid == os.getpid()
        assert flavor == 0, "RUSAGE_INFO_V0"
        usage = buffer._obj
        assert type(usage) is memory._Usage
        usage.wired_size, usage.resident_size, usage.phys_footprint, usage.proc_start_abstime = (
            1,
            2,
            2**40 + 3,
            4,
        )
        ctypes.set_errno(errno.ESRCH if self.status else 0)
        return self.status

    def host_statistics64(self, host, flavor, info, count):
        self.calls.append("host_statistics64")
        assert self.mach_host_self.restype is ctypes.c_uint32, "mach_port_t is unsigned"
        assert host.value == HOST
        assert flavor == 4, "HOST_VM_INFO64"
        assert count._obj.value == 38, "HOST_VM_INFO64_COUNT, in integers"
        pages = info._obj
        pages.free, pages.active, pages.inactive, pages.wired, pages.compressor = (
            1000,
            20_000,
            300,
            4_000_000,
            50,
        )
        return self.status

    def malloc_zone_pressure_relief(self, zone, goal):
        self.calls.append("malloc_zone_pressure_relief")
        assert type(zone) is ctypes.c_void_p
        assert zone.value is None, "from all zones"
        assert type(goal) is ctypes.c_size_t
        assert goal.value == 0, "as much as possible"
        return 4096


@pytest.fixture
def system(monkeypatch):
    made, opened = System(), []

    def load(name, **options):
        assert name is None
        opened.append(options)
        return made

    made.opened = opened
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", load)
    return made


def test_the_footprint_is_the_physical_one(system):
    assert memory.footprint() == 2**40 + 3
    assert system.calls == ["proc_pid_rusage"]
    assert system.opened == [{"use_errno": True}], "otherwise ctypes does not keep errno"


def test_a_footprint_that_cannot_be_read_is_an_oserror_with_its_errno(system):
    system.status = -1
    with pytest.raises(ProcessLookupError, match="proc_pid_rusage failed"):
        memory.footprint()


def test_what_could_be_used_is_free_and_inactive_pages(system):
    assert memory.available() == 1300 * resource.getpagesize()
    assert system.calls == ["mach_host_self", "host_statistics64"]


def test_what_could_be_used_is_not_known_where_the_kernel_does_not_say(system):
    system.status = 5  # KERN_FAILURE
    assert memory.available() is None


def test_malloc_gives_back_all_of_its_zones(system):
    assert memory.give_back() is None
    assert system.calls == ["malloc_zone_pressure_relief"]
