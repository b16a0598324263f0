"""Memory that is touched for the first time is slow: the kernel clears it, looks for huge pages, and in a virtual machine may have
to ask its host (52 MB: 26 ms in pages of 4 KiB, 3 to 130 ms in huge ones). So large tensors lie in huge pages, and what they leave
is kept for the next ones.

2,048 rows of `bench-100m` from host memory into a context: 27 ms in plain pages, 10 in new huge ones, 6 in used ones. Decoding,
with weights in huge pages: 14.8 instead of 15.9 ms a token.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
LEAST = 2 * HUGE_PAGE  # below it, rounding up would waste too much
KEPT = 512 << 20  # bytes that are kept for later
WASTE = 1.5  # memory that is so many times as large as wanted is left for others
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class _Pool:
    """Mapped memory that nobody uses. It may be given back at any moment, also from within `take`, by the garbage collector."""

    def __init__(self) -> None:
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []  # the oldest first
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            self._collect()
            fitting = [m for m in self._free if num_bytes <= len(m) <= WASTE * num_bytes + HUGE_PAGE]
            if fitting:
                found = min(fitting, key=len)
                self._free.remove(found)
                return found
        memory = mmap.mmap(
            -1, math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def give_back(self, memory: mmap.mmap) -> None:
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        while sum(map(len, self._free)) > KEPT:
            del self._free[0]


_pool = _Pool()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """As `torch.empty`; on CPU, where it is large, in huge pages if the system has any, and where others have been before."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or num_bytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = _pool.take(num_bytes)
    lease = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)  # lives as long as the tensor and its views
    weakref.finalize(lease, _pool.give_back, memory).atexit = False
    return torch.from_numpy(lease).view(dtype).view(tuple(shape))


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to `KEPT` bytes, for the next step's tensors. Of the whole process; only where
    that library is glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, KEPT)
    mallopt(M_TRIM_THRESHOLD, KEPT)
