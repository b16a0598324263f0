"""Mapped memory is page-aligned, zeroed, and costs nothing until it is touched."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from afterglow.memory import pages
from afterglow.memory.pages import HUGE_PAGE, allocate, give_back, keep_freed_memory


@pytest.mark.parametrize("size", [1, 4096, 5000, HUGE_PAGE // 4 - 1, HUGE_PAGE // 4, 1 << 20, (3 << 20) + 1])
@pytest.mark.parametrize("reserve", [True, False])
def test_memory_is_aligned_and_zeroed(size: int, reserve: bool) -> None:
    memory = allocate(size, reserve=reserve)
    assert memory.nbytes == size
    assert memory.ctypes.data % (HUGE_PAGE if size >= HUGE_PAGE // 4 else 4096) == 0
    assert not memory.any()
    memory[:] = 1


def test_no_bytes_are_no_mapping() -> None:
    assert allocate(0).nbytes == 0


def test_what_is_made_of_the_memory_keeps_it() -> None:
    part = allocate(1 << 20)[4096:8192].view(np.float32)
    part[:] = 3
    others = [allocate(1 << 20) for _ in range(4)]
    for other in others:
        other[:] = 255
    assert (part == 3).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_without_reserve_is_not_counted() -> None:
    """Otherwise a process whose host cache is larger than the machine's memory cannot start another process."""
    memory = allocate(1 << 30, reserve=False)
    flags: list[str] = []
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            here = first <= memory.ctypes.data < last
        elif here and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert "nr" in flags
    assert "ac" not in flags


def test_more_than_there_are_addresses_for_is_refused() -> None:
    with pytest.raises((OSError, OverflowError, ValueError)):
        allocate(1 << 60)


RELEASED = """
import ctypes, sys
from afterglow.memory.pages import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
pages = lambda: int(open("/proc/self/statm").read().split()[1])
block = libc.malloc(64 << 20)
ctypes.memset(block, 1, 64 << 20)
full = pages()
libc.free(block)
print((full - pages()) * 4096 >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has mallopt")
@pytest.mark.parametrize(("how", "least", "most"), [("leave", 60, 70), ("keep", 0, 4)])
def test_the_c_library_keeps_what_is_freed_when_told_so(how: str, least: int, most: int) -> None:
    """In a process of its own: the setting is the whole process's."""
    done = subprocess.run([sys.executable, "-c", RELEASED, how], capture_output=True, text=True, timeout=60, check=True)
    assert least <= int(done.stdout) <= most, "MiB that went back to the system"


@pytest.mark.parametrize("library", [object(), OSError("no such library")])
def test_another_c_library_is_left_alone(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str | None) -> object:
        asked.append(name)
        if isinstance(library, OSError):
            raise library
        return library

    monkeypatch.setattr(pages.ctypes, "CDLL", load)
    keep_freed_memory()
    assert asked == [None]
    monkeypatch.undo()
    assert ctypes.CDLL(None) is not library


def test_no_bytes_are_no_page() -> None:
    memory = allocate(2 * mmap.PAGESIZE)
    memory[:] = 1
    give_back(memory.ctypes.data + 100, 0)
    assert memory.all()
    give_back(memory.ctypes.data, mmap.PAGESIZE)
    assert memory[mmap.PAGESIZE :].all()
