"""The figures of memory, compared with psutil, and the structs of macOS, with their headers."""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx
import psutil
import pytest

from shim.core import memory, values
from shim.core.memory import Usage
from shim.core.values import Wired

MIB, GIB = 2**20, 2**30


def test_the_figures_are_those_of_psutil():
    held = mx.ones((64, MIB // 4))
    mx.eval(held)
    usage = memory.usage(mx)
    seen = psutil.Process().memory_info().rss
    assert usage.footprint == pytest.approx(seen, rel=0.05)
    assert usage.active >= 64 * MIB
    assert memory.total() == psutil.virtual_memory().total
    assert memory.available() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    before = usage.active
    del held
    assert memory.usage(mx).active == pytest.approx(before - 64 * MIB, abs=MIB)


def test_the_footprint_is_read_where_linux_writes_it():
    assert memory._resident("Name:\tx\nVmRSS:\t  2048 kB\n") == 2 * MIB
    with pytest.raises(OSError, match="no VmRSS"):
        memory._resident("Name:\tx\n")


def test_bytes_as_people_say_them():
    assert memory.format_bytes(3 * 2**29) == "1.50 GiB"
    assert memory.format_bytes(3 * 2**19) == "1.5 MiB"


def test_the_larger_counts():
    assert Usage(100, 20, 90).counted == 120
    assert Usage(100, 20, 190).counted == 190


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of glibc")
def test_malloc_gives_back():
    # Each is smaller than what malloc maps separately.
    held = [bytes(100_000) for _ in range(600)]
    keep = held[::50]
    full = memory.footprint()
    del held
    memory.give_back()
    assert memory.footprint() < full - 20 * MIB
    assert len(keep) == 12


def test_the_structs_of_macos_have_the_sizes_of_its_headers():
    """sys/resource.h: a uuid of 16 bytes, then ten uint64.

    mach/vm_statistics.h: HOST_VM_INFO64_COUNT is 38 integers.
    """
    assert ctypes.sizeof(memory._Usage) == 16 + 10 * 8
    assert memory._Usage.phys_footprint.offset == 16 + 7 * 8
    assert memory._Usage.phys_footprint.size == 8
    assert ctypes.sizeof(memory._Statistics) == 38 * 4
    assert memory._Statistics.free.offset == 0
    assert memory._Statistics.inactive.offset == 2 * 4


@pytest.mark.parametrize("level", [1, 2, 4])
def test_macos_pressure_by_a_stand_in_for_its_call(level, monkeypatch):
    class Libc:
        @staticmethod
        def sysctlbyname(name, old, size, new, length):
            assert name == b"kern.memorystatus_vm_pressure_level"
            assert new is None
            assert length.value == 0
            assert size._obj.value == 4
            old._obj.value = level
            return 0

    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *_: Libc)
    assert memory.is_critical() is (level == 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stock", None),
        ("off", Wired()),
        ("0", Wired()),
        ("12G", Wired(12 * GIB)),
        ("50%", Wired(32 * GIB)),
        ("model+4G", Wired(4 * GIB, model=True)),
        ("model+10%", Wired(int(6.4 * GIB), model=True)),
        ("auto", Wired(4 * GIB, model=True, auto=True)),
    ],
)
def test_wired_is_read(text, expected, monkeypatch):
    monkeypatch.setattr(memory, "total", lambda: 64 * GIB)
    assert values.parse_wired(text) == expected


@pytest.mark.parametrize(
    "text", ["all", "model", "model+", "-1", "120%", "4G+model", "1e9", "nan", "%", "12X"]
)
def test_what_wired_is_not(text):
    with pytest.raises(ValueError, match=r"accepted: stock, off, auto, a size such as 12G"):
        values.parse_wired(text)


@pytest.mark.parametrize("text", ["-1", "101%", "1000%", "half", "%", "5 G B", ""])
def test_what_a_limit_is_not(text):
    with pytest.raises(ValueError, match="accepted: a size such as 48G, or a share"):
        values.parse_memory(text)


def test_a_limit_is_a_size_or_a_share(monkeypatch):
    monkeypatch.setattr(memory, "total", lambda: 64 * GIB)
    assert [values.parse_memory(text) for text in ("0", "48G", "75%", "100 %", "12.5%")] == [
        0,
        48 * GIB,
        48 * GIB,
        64 * GIB,
        8 * GIB,
    ]
    assert [values.parse_optional_size(text) for text in ("stock", "0", "1M")] == [None, 0, MIB]
    with pytest.raises(ValueError, match="accepted: stock, or a size"):
        values.parse_optional_size("much")


@pytest.mark.parametrize(
    ("policy", "model", "expected"),
    [
        ("off", 10, 0),
        ("5G", 10, 5),
        ("model+4G", 10, 14),
        ("model+4G", 0, 0),
        ("auto", 38, 0),
        ("auto", 39, 43),
        ("auto", 0, 0),
    ],
)
def test_how_much_may_be_wired(policy, model, expected):
    assert values.parse_wired(policy).most(model * GIB, 64 * GIB) == expected * GIB
