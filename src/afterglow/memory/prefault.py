"""Touch memory before it is used, in one background thread that rests while a step computes.

Memory that is touched for the first time is slow: the kernel clears it, looks for huge pages, and in a virtual machine may have
to ask its host (52 MB: 26 ms in pages of 4 KiB, 3 to 130 ms in huge ones). Done within a step, that takes the step's own cores:
every second prefill of 1,024 tokens (`bench-56m`, two threads) took 320 instead of 210 ms.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from afterglow.memory.pages import HUGE_PAGE, Bytes
from afterglow.thread_priority import give_way

THREAD: Final = "afterglow-prefault"
SLOT_BYTES: Final = 128 << 20  # of the host arena, beyond the last slot that was used
PATIENCE: Final = 0.25  # seconds; when steps leave no time for so long, one piece is touched all the same
_QUIET: Final = 0.02  # seconds without a step after which there is time
_POPULATE_WRITE: Final = 23  # madvise(2): as if written to, but nothing changes; Linux 5.14


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    memory: Sequence[Bytes]  # which must not be unmapped meanwhile
    pieces: Iterator[tuple[int, int]]
    done: Callable[[bool], None]


class Prefault:
    """Owns the background thread, which runs only while there is memory to touch."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.computing = _Steps(patience)  # a context manager: enter it for the length of a step
        self._lock = threading.Lock()
        self._queue: list[_Work] = []
        self._running = False

    def start(self, memory: Sequence[Bytes], done: Callable[[bool], None]) -> None:
        """Begin to touch all pages of some contiguous arrays; their contents stay.

        `done(ok)` is called from the thread at the end. `ok` False: the system cannot do this (not Linux, or an older one), or
        has no memory; the remaining pages are touched when they are used.
        """
        if sys.platform != "linux":
            done(False)
            return
        with self._lock:
            self._queue.append(_Work(memory, _pieces(memory), done))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def _run(self) -> None:
        give_way()
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                works = list(self._queue)
            self.computing.wait_for_pause()
            for work in works:  # a piece of each: none waits until another is complete
                piece = next(work.pieces, None)
                ok = piece is None or populate(*piece)
                if piece is None or not ok:
                    with self._lock:
                        self._queue.remove(work)
                    work.done(ok)


class SlotPrefault:
    """Touches the slots of a host arena ahead of their use, from the lowest on, which is how they are given out."""

    def __init__(self, prefault: Prefault, arena: Bytes, ahead_bytes: int = SLOT_BYTES) -> None:
        """`arena` uint8 [layers, 2, slots, bytes of a chunk], not locked in memory."""
        self._prefault = prefault
        self._planes = [plane for layer in arena for plane in layer]
        self._slots = arena.shape[2]
        self._ahead = ahead_bytes // max(1, arena.nbytes // max(1, self._slots))
        self._reached = 0  # slots that have been touched, or will be by work that is queued
        self._works = self._ahead > 0

    def reach(self, slots: int) -> None:
        """Prepare for `slots` slots, from the first on, that are in use or about to be."""
        if not self._works or slots + self._ahead // 2 <= self._reached or self._reached == self._slots:
            return
        start, self._reached = self._reached, min(self._slots, slots + self._ahead)
        if self._reached > start:
            self._prefault.start([plane[start : self._reached] for plane in self._planes], self._touched)

    def _touched(self, ok: bool) -> None:
        self._works = self._works and ok


class _Steps:
    """Tells whether an engine is computing."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
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

    def wait_for_pause(self) -> None:
        """Wait until there has been no step for a moment, at most `patience` seconds."""
        until = time.monotonic() + self._patience
        while (self._running or time.monotonic() < self._ended + _QUIET) and time.monotonic() < until:
            time.sleep(_QUIET / 4)


def populate(address: int, num_bytes: int) -> bool:
    """Have the system provide the pages of some memory; False: it cannot, or has none. `address` is page-aligned."""
    return bool(_madvise()(address, num_bytes, _POPULATE_WRITE) == 0)


@functools.cache
def _madvise() -> Any:
    call = ctypes.CDLL(None, use_errno=True).madvise  # lets other threads run meanwhile, unlike mmap's
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def _pieces(memory: Sequence[Bytes]) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of pieces that end at huge pages.

    They are small because other threads that map memory wait for the end of a call (up to 100 ms for all of 20 MB), and because
    the processor does nothing else while a virtual machine's host looks for the memory.
    """
    for array in memory:
        at, end = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE, array.ctypes.data + array.nbytes
        while at < end:
            stop = min(end, (at // HUGE_PAGE + 1) * HUGE_PAGE)
            yield at, stop - at
            at = stop
