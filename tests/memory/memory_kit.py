"""Figures of this process's memory, and its pre-fault threads."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from afterglow.memory import prefault
from afterglow.memory.pages import HUGE_PAGE

STATM = Path("/proc/self/statm")


def mapped() -> int:
    """Bytes of address space that the process has."""
    return int(STATM.read_text().split()[0]) * 4096


def resident(memory: npt.NDArray[np.uint8]) -> int:
    """Bytes of the pages of page-aligned memory that are there, on Linux."""
    pages = np.zeros(-(-memory.nbytes // 4096), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(memory.ctypes.data, memory.nbytes, pages.ctypes.data) == 0, ctypes.get_errno()
    return int((pages & 1).sum()) * 4096


def settle() -> None:
    """Wait until no memory is touched ahead any more."""
    for thread in threading.enumerate():
        if thread.name == prefault.THREAD:
            thread.join(30)
            assert not thread.is_alive()


def can_populate() -> bool:
    """Whether this system touches pages on request."""
    memory = np.empty(HUGE_PAGE, np.uint8)
    return prefault.populate(-(-memory.ctypes.data // 4096) * 4096, 4096)
