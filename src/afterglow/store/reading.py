"""Chunks on request, and rewriting in the background: what SPEC asks of the store besides whole extents.

The same threads and the same order for each extent as for moves; but nothing of it is planned, so that nothing is reported
to the plan: the caller waits for the answer. A new version of a file is made beside the old one, in no order with what is
read; only its renaming, which is a moment's work, is in the extent's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from afterglow.errors import StoreError
from afterglow.plan.step import BACKGROUND
from afterglow.store.chunks import ChunkRead, Stale
from afterglow.store.extent import Head
from afterglow.store.mover import Mover
from afterglow.store.rewriting import Ranks, Rewriting
from afterglow.store.task import Abandoned, Task
from afterglow.store.tier import Tier

Lost = Callable[[str, StoreError], None]
Count = Callable[[str | None, int, float], None]


class Reading:
    """Chunks on their way. `head` and `bytes` are there when `wait` was True; `stale`: the file is of another edition."""

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


class Rewrite:
    """A new version of a file on its way. `written`: it has taken the old one's place. `seconds` of work so far."""

    def __init__(self) -> None:
        self.written = False
        self.seconds = 0.0
        self._rewriting: Rewriting | None = None
        self._tasks: list[Task] = []

    @property
    def ended(self) -> bool:
        """It has been written, was not needed, or never will be."""
        return all(task.over for task in self._tasks)


class Reader:
    """Reads chunks and rewrites extents of one tier. `rows`: of each extent that is there. `lost` is told of errors, `count`
    of what was done: an error's kind or None, bytes, seconds."""

    def __init__(self, tier: Tier, mover: Mover, rows: dict[str, int], lost: Lost, count: Count) -> None:
        self._tier = tier
        self._mover = mover
        self._rows = rows
        self._lost = lost
        self._count = count

    def read(self, extent: str, reads: Sequence[ChunkRead], edition: str, priority: int) -> Reading:
        """Begin to read; without reads, to look up the head. The buffers are the store's until `ended`."""
        reading = Reading()

        def work(task: Task) -> int:
            task.advance()
            rows, began = self._rows_of(extent), time.perf_counter()
            try:
                reading.bytes, head = self._tier.read_chunks(extent, rows, reads, edition)
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

    def rewrite(self, extent: str, ranks: Ranks) -> Rewrite:
        """Put an extent's rows in another order, in the background and one layer at a time, unless they lie so already:
        `ranks` is asked for it from a thread of the store's (`Tier.rewriting`)."""
        rewrite = Rewrite()

        def work(task: Task) -> int:
            began = time.perf_counter()
            try:
                if rewrite._rewriting is None:
                    rewrite._rewriting = self._tier.rewriting(extent, self._rows_of(extent), ranks)
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
                task.pause()  # whatever else there is to do goes first
            elif rewriting.needed:
                rewrite._tasks.append(self._settle(extent, rewrite, None))
            else:
                rewriting.close()
            return rewriting.written - before

        rewrite._tasks.append(Task(f"rewriting {extent}", BACKGROUND, work, move=None, writes=True))
        self._mover.submit(*rewrite._tasks)
        return rewrite

    def _settle(self, extent: str, rewrite: Rewrite, error: StoreError | None) -> Task:
        """In the extent's order: let a new version take the old one's place, or give up a file that is damaged."""

        def work(task: Task) -> int:
            task.advance()
            rewriting = rewrite._rewriting
            if rewriting is None:  # what could not even be looked at
                if error is not None and extent in self._rows:
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

    def _rows_of(self, extent: str) -> int:
        rows = self._rows.get(extent)
        if rows is None:
            raise StoreError(f"extent {extent[:16]} is not on disk") from FileNotFoundError(2, "missing")
        return rows

    def _submit(self, extent: str, priority: int, work: Callable[[Task], int], *, writes: bool) -> Task:
        def guarded(task: Task) -> int:
            try:
                return work(task)
            except Abandoned:
                raise
            except StoreError as error:
                self._lost(extent, error)
                raise

        task = Task(extent, priority, guarded, move=None, writes=writes)
        self._mover.submit(task)
        return task
