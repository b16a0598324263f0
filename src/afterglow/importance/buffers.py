"""Memory that chunks are read into, and that they stay in while they are cached.

Memory that nobody has used before costs more than what is read into it: of 10 MB a request, 18 ms of its pages and a copy.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from afterglow.store.files import aligned_memory
from afterglow.store.layout import align_up

SLAB = 16 << 20  # bytes that are taken from the system at a time


class Buffers:
    """Page-aligned buffers of one size. One is used again when no array or tensor over it is left; none ever goes back to the
    system, so that there are as many as there have been at once."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._apart = align_up(num_bytes)
        self._free: deque[memoryview] = deque()  # filled by whoever lets go of the last view, in any thread

    def take(self) -> npt.NDArray[np.uint8]:
        """uint8 [num_bytes], of no meaning yet. For one thread at a time."""
        if not self._free:
            slab = aligned_memory(max(1, SLAB // self._apart) * self._apart).data
            self._free.extend(slab[at : at + self.num_bytes] for at in range(0, len(slab), self._apart))
        memory = self._free.pop()  # what was used last is still in the processor's caches
        lease = np.frombuffer(memory, np.uint8)  # no view of an array: what is made of it holds on to it
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return lease
