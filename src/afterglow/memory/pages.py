"""Map page-aligned memory, on huge pages where the system has them.

The first touch of a 4 KiB page costs as much as the copy that causes it, and a transfer past the page cache needs one address
for the device per huge page instead of one per 4 KiB.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE: Final = 2 << 20
LARGE: Final = 2 * HUGE_PAGE  # bytes of tensors; below it, rounding up to huge pages would waste too much
_HUGE_FROM: Final = HUGE_PAGE // 4  # bytes of buffers for transfers, which are few
_NO_RESERVE_ON_LINUX: Final = dict.fromkeys(("x86_64", "aarch64", "riscv64", "s390x"), 0x4000) | {"ppc64le": 0x40}
_KEPT_BY_MALLOC: Final = 512 << 20  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def _no_reserve() -> int:
    """Return the flag that keeps a mapping out of the system's count. The mmap module of Python 3.11 and 3.12 does not name it."""
    of_linux = _NO_RESERVE_ON_LINUX.get(platform.machine(), 0) if sys.platform == "linux" else 0
    flag: int = getattr(mmap, "MAP_NORESERVE", of_linux)
    return flag


def allocate(num_bytes: int, *, reserve: bool = True) -> Bytes:
    """Map zeroed memory that costs nothing until it is touched: uint8 [num_bytes], page-aligned.

    From half a megabyte on the memory starts at a huge page and asks for huge pages. `reserve` False: do not count the memory
    against the system's limit before it is touched, nor again for each child process.

    Raises:
        OSError, OverflowError, ValueError: the system cannot map so much.
    """
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    huge = num_bytes >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE")
    page = HUGE_PAGE if huge else mmap.PAGESIZE
    size = round_up(num_bytes, page) + (page if huge else 0)  # one more, to begin at a huge page
    # Private, not shared as is mmap's default: only private memory can have huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserve else _no_reserve()))
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    start = -flat.ctypes.data % page
    return flat[start : start + num_bytes]


def round_up(num_bytes: int, unit: int = HUGE_PAGE) -> int:
    """Compute the least multiple of `unit` that is not below `num_bytes`."""
    return -(-num_bytes // unit) * unit


def read_soon(address: int, num_bytes: int) -> None:
    """Ask the system to read a part of a mapped file that will be used at once, in large reads instead of page by page."""
    _advise(address, num_bytes, getattr(mmap, "MADV_WILLNEED", None))


def give_back(address: int, num_bytes: int) -> None:
    """Let the system have pages. They stay mapped: a later access reads a mapped file again, and finds zeros in `allocate`'s memory."""
    _advise(address, num_bytes, getattr(mmap, "MADV_DONTNEED", None))


def _advise(address: int, num_bytes: int, advice: int | None) -> None:
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and num_bytes:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + num_bytes - start), ctypes.c_int(advice))


def keep_freed_memory() -> None:
    """Let the C library keep up to 512 MiB of freed memory for the next step's tensors.

    The setting holds for the whole process. It has no effect where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _KEPT_BY_MALLOC)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BY_MALLOC)
