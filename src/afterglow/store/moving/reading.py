"""Chunks on request, and rewriting in the background: SPEC needs both from the store besides whole extents.

Both use the threads of moves, and keep the same order for each extent. But they are not planned, so nothing is reported to
the plan: the caller waits for the answer. A new version of a file is made beside the old one, in no order with reads;
only its renaming, which is a moment's work, is in the extent's order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from afterglow.errors import StoreError
from afterglow.plan.step import BACKGROUND
from afterglow.store.extents.chunks import ChunkRead, Stale
from afterglow.store.extents.head import Head
from afterglow.store.extents.rewriting import Ranks, Rewriting
from afterglow.store.faults import kind_of
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.store_stats import StoreCounters
from afterglow.store.moving.stored_extents import StoredExtents
from afterglow.store.moving.task import Abandoned, Task


class Reading:
    """Stands for chunks on their way. `head` is set when `wait` was True, `bytes` when it has `ended`; `stale`: the edition is
    another."""

    def __init__(self, reads: Sequence[ChunkRead]) -> None:
        self.head: Head | None = None
        self.stale = False
        self.bytes = 0
        self.seconds = 0.0
        self._task: Task | None = None
        self._reads = list(reads)
        self._begun = False
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> bool:
        """Wait for all the chunks, at most `timeout` seconds (0: only look); tell whether they are in place."""
        assert self._task is not None
        return self._task.wait_layer(0, timeout) and self.head is not None

    def take_back(self, reads: Sequence[ChunkRead]) -> bool:
        """Take back some of the reads, unless they have begun; tell whether that was in time. They must not be waited for after that."""
        with self._lock:
            if not self._begun:
                self._reads = [read for read in self._reads if not any(read is other for other in reads)]
            return not self._begun

    def _begin(self) -> list[ChunkRead]:
        """Begin with what is left to read."""
        with self._lock:
            self._begun = True
            return self._reads

    @property
    def ended(self) -> bool:
        """Tell whether the chunks have come, or never will."""
        assert self._task is not None
        return self._task.over


class Rewrite:
    """Stands for a new version of a file on its way. `written`: it has taken the old one's place. `seconds` of work so far."""

    def __init__(self) -> None:
        self.written = False
        self.seconds = 0.0
        self._rewriting: Rewriting | None = None
        self._tasks: list[Task] = []

    @property
    def ended(self) -> bool:
        """Tell whether the new version has been written, was not needed, or never will be."""
        return all(task.over for task in self._tasks)


class ChunkIO:
    """Reads chunks and rewrites extents of a disk tier."""

    def __init__(self, stored: StoredExtents, mover: Mover, counters: StoreCounters) -> None:
        assert stored.tier is not None, "there is no disk tier"
        self._stored = stored
        self._tier = stored.tier
        self._mover = mover
        self._counters = counters

    def read(self, extent: str, reads: Sequence[ChunkRead], edition: str, priority: int) -> Reading:
        """Begin to read; without reads, to look up the head. The buffers are the store's until `ended`."""
        reading, only_head = Reading(reads), not reads

        def work(task: Task) -> int:
            task.advance()
            left = reading._begin()
            if not left and not only_head:  # all were taken back
                return 0
            rows, began = self._stored.rows(extent), time.perf_counter()
            try:
                reading.bytes, head = self._tier.read_chunks(extent, rows, left, edition)
            except Stale as stale:
                reading.stale, reading.bytes = True, stale.bytes
                self._count(stale.bytes, time.perf_counter() - began)
                return 0
            reading.seconds = time.perf_counter() - began
            reading.head = head
            task.advance(1)
            self._count(reading.bytes, reading.seconds)
            return reading.bytes

        reading._task = self._submit(extent, priority, work, writes=False)
        return reading

    def _count(self, moved: int, seconds: float) -> None:
        self._counters.count(chunk_reads=1, chunk_read_bytes=moved, chunk_read_seconds=seconds)

    def has(self, extent: str) -> bool:
        """Tell whether an extent is on disk."""
        return extent in self._stored

    def urge(self, readings: Sequence[Reading]) -> None:
        """Make these reads urgent: a request waits for them now."""
        self._mover.urge([reading._task for reading in readings if reading._task is not None])

    def rewrite(self, extent: str, ranks: Ranks) -> Rewrite:
        """Put an extent's rows in another order, in the background and one layer at a time, unless they lie so already.

        A thread of the store calls `ranks` for the order (`Tier.rewriting`).
        """
        rewrite = Rewrite()

        def work(task: Task) -> int:
            began = time.perf_counter()
            try:
                if rewrite._rewriting is None:
                    rewrite._rewriting = self._tier.rewriting(extent, self._stored.rows(extent), ranks)
                rewriting = rewrite._rewriting
                before = rewriting.written
                more = rewriting.needed and rewriting.go_on()
                task.advance()
            except Abandoned:
                raise
            except StoreError as error:
                rewrite._tasks.append(self._settle(extent, rewrite, error))
                raise
            rewrite.seconds += time.perf_counter() - began
            if more:
                task.pause()  # all other work goes first
            elif rewriting.needed:
                rewrite._tasks.append(self._settle(extent, rewrite, None))
            else:
                rewriting.close()
            return rewriting.written - before

        rewrite._tasks.append(Task(f"rewriting {extent}", BACKGROUND, work, move=None, writes=True))
        self._mover.submit(*rewrite._tasks)
        return rewrite

    def _settle(self, extent: str, rewrite: Rewrite, error: StoreError | None) -> Task:
        """Let a new version take the old one's place, or give up a damaged file, in the extent's order."""

        def work(task: Task) -> int:
            task.advance()
            rewriting = rewrite._rewriting
            if rewriting is None:  # the file could not even be opened
                if error is not None and extent in self._stored:
                    raise error
            elif error is None:
                rewrite.written = rewriting.publish()
                self._tier.rewritten(extent)
            else:
                current = rewriting.current
                rewriting.close()
                if current:
                    raise error
            return 0

        return self._submit(extent, BACKGROUND, work, writes=False)

    def _submit(self, extent: str, priority: int, work: Callable[[Task], int], *, writes: bool) -> Task:
        def guarded(task: Task) -> int:
            try:
                return work(task)
            except Abandoned:
                raise
            except StoreError as error:
                self._stored.drop_lost(extent, error)
                self._counters.count_error(kind_of(error))
                raise

        task = Task(extent, priority, guarded, move=None, writes=writes)
        self._mover.submit(task)
        return task
