"""Chunks on request, and rewriting in the background: what SPEC asks of the store besides whole extents.

The same threads and the same order for each extent as for moves; but nothing of it is planned, so that nothing is reported
to the plan: whoever asked waits for the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from afterglow.errors import StoreError
from afterglow.plan.step import BACKGROUND
from afterglow.store.chunks import ChunkRead, Stale
from afterglow.store.extent import Head
from afterglow.store.mover import Mover
from afterglow.store.task import Abandoned, Task
from afterglow.store.tier import Tier

Lost = Callable[[str, StoreError], None]
Count = Callable[[str | None, int, float], None]


class Reading:
    """Chunks on their way. `head` and `bytes` are there when `wait` was True; `stale`: the file has another version."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.stale = False
        self.bytes = 0
        self.seconds = 0.0
        self._task: Task | None = None

    def wait(self, timeout: float | None) -> bool:
        """Whether all that was asked for is in place, waiting for at most `timeout` seconds (0: has it come?)."""
        assert self._task is not None
        return self._task.wait_layer(0, timeout) and self.head is not None

    @property
    def ended(self) -> bool:
        """It has come, or never will."""
        assert self._task is not None
        return self._task.over


class Reader:
    """Reads chunks and rewrites extents of one tier. `rows`: of each extent that is there. `lost` is told of errors, `count`
    of what was done: an error's kind or None, bytes, seconds."""

    def __init__(self, tier: Tier, mover: Mover, rows: dict[str, int], lost: Lost, count: Count) -> None:
        self._tier = tier
        self._mover = mover
        self._rows = rows
        self._lost = lost
        self._count = count

    def read(self, extent: str, reads: Sequence[ChunkRead], version: int, priority: int) -> Reading:
        """Begin to read; without reads, to look up the head. The buffers are the store's until `ended`."""
        reading = Reading()

        def work(task: Task) -> int:
            task.advance()
            rows, began = self._rows_of(extent), time.perf_counter()
            try:
                reading.bytes, head = self._tier.read_chunks(extent, rows, reads, version)
            except Stale:
                reading.stale = True
                return 0
            reading.seconds = time.perf_counter() - began
            reading.head = head
            task.advance(1)
            self._count(None, reading.bytes, reading.seconds)
            return reading.bytes

        reading._task = self._submit(extent, priority, work, writes=False)
        return reading

    def has(self, extent: str) -> bool:
        """Is it on disk?"""
        return extent in self._rows

    def urge(self, readings: Sequence[Reading]) -> None:
        """Somebody waits for these now."""
        self._mover.urge([reading._task for reading in readings if reading._task is not None])

    def rewrite(self, extent: str, orders: npt.NDArray[np.uint16], done: Callable[[bool], None] | None = None) -> None:
        """Put an extent's rows in another order, in the background: `orders` uint16 [layers, rows] (`Tier.rewrite`). `done`
        is told, from a thread of the store's, whether it was."""

        def work(task: Task) -> int:
            written = self._tier.rewrite(extent, self._rows_of(extent), orders, task.advance)
            if done is not None:
                done(True)
            return written

        def failed() -> None:
            if done is not None:
                done(False)

        self._submit(extent, BACKGROUND, work, writes=True, failed=failed)

    def _rows_of(self, extent: str) -> int:
        rows = self._rows.get(extent)
        if rows is None:
            raise StoreError(f"extent {extent[:16]} is not on disk") from FileNotFoundError(2, "missing")
        return rows

    def _submit(
        self,
        extent: str,
        priority: int,
        work: Callable[[Task], int],
        *,
        writes: bool,
        failed: Callable[[], Any] | None = None,
    ) -> Task:
        def guarded(task: Task) -> int:
            try:
                return work(task)
            except Abandoned:
                raise
            except StoreError as error:
                self._lost(extent, error)
                if failed is not None:
                    failed()
                raise

        task = Task(extent, priority, guarded, move=None, writes=writes)
        self._mover.submit(task)
        return task
