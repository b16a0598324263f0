"""Memory that is touched for the first time is slow: the kernel clears it, looks for huge pages, and in a virtual machine may have
to ask its host (52 MB: 26 ms in pages of 4 KiB, 3 to 130 ms in huge ones). So large tensors lie in huge pages, and what they leave
is kept for the next ones.

2,048 rows of `bench-100m` from host memory into a context: 27 ms in plain pages, 10 in new huge ones, 6 in used ones. Decoding,
with weights in huge pages: 14.8 instead of 15.9 ms a token.

Contexts of new requests would still be new memory until the first ones are given up, and each prefill of 1,024 tokens
(`bench-56m`) spent 60 ms of 240 on that. So a little of what contexts take is touched ahead, in the background.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
LEAST = 2 * HUGE_PAGE  # below it, rounding up would waste too much
KEPT = 512 << 20  # bytes that are kept for later
WASTE = 1.5  # memory that is so many times as large as wanted is left for others
AHEAD = 64 << 20  # bytes that are touched ahead,
MARGIN = 1.25  # in pieces so many times as large as the last one that was wanted
NICE = 10  # of whoever does that
QUIET = 0.02  # seconds without a step: then there is time for it
PATIENCE = 0.25  # seconds: without any time one piece is done all the same
POPULATE_WRITE = 23  # madvise(2): as if written to, but nothing changes; Linux 5.14
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class _Steps:
    """Whether any engine of this process is computing."""

    def __init__(self) -> None:
        self._running = 0
        self._ended = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            self._ended = time.monotonic()

    def wait(self) -> None:
        """Until there has been none for a moment; not for ever."""
        until = time.monotonic() + PATIENCE
        while (self._running or time.monotonic() < self._ended + QUIET) and time.monotonic() < until:
            time.sleep(QUIET / 4)


_steps = _Steps()


def computing() -> AbstractContextManager[None]:
    """While a step is carried out: what can wait does."""
    return _steps


class _Pool:
    """Mapped memory that nobody uses. It may be given back at any moment, also from within `take`, by the garbage collector."""

    def __init__(self) -> None:
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []  # the oldest first
        self._lock = threading.Lock()
        self._preparing = False  # somebody touches memory ahead
        self._wanted = 0  # bytes that were taken last, by who wants such memory again

    def take(self, num_bytes: int, again: bool) -> mmap.mmap:
        """Memory for so many bytes; `again`: more such will be wanted."""
        with self._lock:
            self._collect()
            fitting = self._fitting(num_bytes)
            found = min(fitting, key=len) if fitting else None
            if found is not None:
                self._free.remove(found)
            if again:
                self._wanted = num_bytes
                if not self._preparing and self._lacking():
                    self._preparing = True
                    threading.Thread(target=self._prepare, name="touch-ahead", daemon=True).start()
        return _mapped(num_bytes) if found is None else found

    def _fitting(self, num_bytes: int) -> list[mmap.mmap]:
        return [m for m in self._free if num_bytes <= len(m) <= WASTE * num_bytes + HUGE_PAGE]

    def _lacking(self) -> bool:
        """Whether there should be more memory of the kind that was wanted last."""
        there = sum(map(len, self._fitting(self._wanted)))
        room = sum(map(len, self._free)) + MARGIN * self._wanted <= KEPT / 2
        return room and there + MARGIN * self._wanted <= max(AHEAD, MARGIN * self._wanted)

    def _prepare(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        works = True
        while True:
            with self._lock:
                self._collect()
                if not works or not self._lacking():
                    self._preparing = not works  # where it does not work it is not tried again
                    return
                size = int(MARGIN * self._wanted)
            try:
                memory = _mapped(size)
            except OSError:  # no memory, or no more mappings
                works = False
                continue
            held = np.frombuffer(memory, dtype=np.uint8)
            works = populated(held.ctypes.data, len(held))
            del held
            self.give_back(memory)

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


def _mapped(num_bytes: int) -> mmap.mmap:
    size = math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populated(address: int, num_bytes: int) -> bool:
    """Have the system provide the pages of so much memory, while there are no steps if possible. False: it cannot, or has none.

    In small pieces: whoever wants other memory meanwhile waits for the end of a call (up to 100 ms for all of 20 MB), and where a
    virtual machine's host has to find the memory, the processor does nothing else meanwhile.
    """
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # lets others run meanwhile, unlike mmap's
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    at, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + num_bytes
    while at < end:
        stop = min(end, (at // HUGE_PAGE + 1) * HUGE_PAGE)
        _steps.wait()
        if madvise(at, stop - at, POPULATE_WRITE) != 0:
            return False
        at = stop
    return True


_pool = _Pool()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None, *, again: bool = False
) -> Tensor:
    """As `torch.empty`; on CPU, where it is large, in huge pages if the system has any, and where others have been before.
    `again`: more of about that size will be wanted, which is prepared for."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if (device is not None and device.type != "cpu") or num_bytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = _pool.take(num_bytes, again)
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
