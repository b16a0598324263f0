"""Lend buffers of one size, and use them again when nothing looks at them any more.

New memory costs more than a read from disk into it: of 10 MB a request, 18 ms of its pages and a copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import numpy as np

from afterglow.memory.pages import Bytes, allocate, round_up

PIECE: Final = 16 << 20  # bytes that are mapped at a time, and cut into buffers


class Buffers:
    """Page-aligned buffers. As many are kept as have been in use at once."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._stride = round_up(num_bytes, 4096)
        self._free: deque[memoryview] = deque()  # filled from any thread, when the last view of a buffer goes

    def take(self) -> Bytes:
        """Lend a buffer with undefined contents: uint8 [num_bytes]. Only for one thread at a time.

        Raises:
            OSError: the system has no memory.
        """
        if not self._free:
            piece = allocate(round_up(max(1, PIECE // self._stride) * self._stride)).data
            self._free.extend(
                piece[at : at + self.num_bytes] for at in range(0, len(piece) - self.num_bytes + 1, self._stride)
            )
        memory = self._free.pop()  # the one that was used last is still in the processor's caches
        # Over a memoryview: slices and views of an array over another array would refer to that one, and not to the lease.
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return lease
