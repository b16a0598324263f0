"""Host memory is there before it is needed: its first touch is made ahead of time, in the background.

The arena costs memory only where it has been touched, and saving rows where nobody has been takes the step's own cores: every
second prefill of 1,024 tokens (`bench-56m`, two threads) took 320 instead of 210 ms.
"""

from __future__ import annotations

import os
import sys
import threading

from torch import Tensor

from afterglow.kernels.memory import NICE, populated

AHEAD_BYTES = 128 << 20  # beyond the last slot that was used


class TouchAhead:
    """The slots of one arena, from the lowest on, which is how they are given out."""

    def __init__(self, blocks: Tensor) -> None:
        """`blocks` [layers, 2, slots, rows, kv_heads, head_dim], in the CPU's memory, not pinned."""
        self._blocks = blocks
        self._slots = blocks.shape[2]
        self._slot_bytes = blocks.stride(2) * blocks.element_size()
        # The thread is ended by the interpreter's end, which it survives only outside of torch: it knows addresses alone.
        self._planes = [plane.data_ptr() for layer in blocks for plane in layer]
        self._ahead = AHEAD_BYTES // max(1, len(self._planes) * self._slot_bytes)
        self._reached = 0  # slots that have been touched, or will be by a thread that is under way
        self._works = sys.platform == "linux" and self._ahead > 0

    def reach(self, slots: int) -> None:
        """So many slots, from the first on, are in use or about to be."""
        if not self._works or slots + self._ahead // 2 <= self._reached or self._reached == self._slots:
            return
        start, self._reached = self._reached, min(self._slots, slots + self._ahead)
        if self._reached > start:
            threading.Thread(target=self._touch, args=(start, self._reached), name="touch-ahead", daemon=True).start()

    def _touch(self, start: int, stop: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for plane in self._planes:
            if not populated(plane + start * self._slot_bytes, (stop - start) * self._slot_bytes):
                self._works = False  # an older kernel, or no memory: they will be touched when they are used
                return
