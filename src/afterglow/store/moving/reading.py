"""Chunks on request, and rewriting in the background: SPEC needs both from the store besides whole extents.

Both use the threads of moves. But they are not planned, so nothing is reported to the plan: the caller waits for the answer.
Chunks are read in no order with what else is done to their extents: files are replaced whole, and a reader says which edition it means.
So what is wanted at once waits for no guess. Only what fails is done again in the order of its extent, which shows whether the extent
is lost. A new version of a file is made beside the old one, in no order with reads; its renaming, which is a moment's
work, is in the extent's order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from afterglow.errors import StoreError
from afterglow.plan.step import BACKGROUND
from afterglow.store.extents.chunks import TAKEN_BACK, WANTED, ExtentChunks, Stale, States
from afterglow.store.extents.head import Head
from afterglow.store.extents.rewriting import Ranks, Rewriting
from afterglow.store.faults import kind_of
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.store_stats import StoreCounters
from afterglow.store.moving.stored_extents import StoredExtents
from afterglow.store.moving.task import Abandoned, Task


class Reading:
    """Stands for chunks on their way. `heads`, by extent, are set when `wait` was True, `bytes` when it has `ended`; `stale`: the edition of
    a file is another; `lost`: the extent that could not be read, if one is known.
    """

    def __init__(self, asked: Sequence[ExtentChunks]) -> None:
        self.heads: dict[str, Head] = {}
        self.stale = False
        self.lost: str | None = None
        self.bytes = 0
        self.seconds = 0.0
        self._tasks: list[Task] = []  # further ones come before the first is over
        self._extents = len(asked)
        self._states = bytearray(sum(len(each.reads) for each in asked))
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> bool:
        """Wait for all the chunks, at most `timeout` seconds (0: only look); tell whether they are in place."""
        until = None if timeout is None else time.monotonic() + timeout
        for task in self._tasks:
            task.wait_layer(0, None if until is None else max(0.0, until - time.monotonic()))
        return len(self.heads) == self._extents

    def take_back(self, read: int) -> bool:
        """Take back a read, by its number among all, unless it has begun; tell whether that was in time. Its chunks must not be waited for
        after that."""
        if self._states[read] != WANTED:
            return False
        self._states[read] = TAKEN_BACK  # if it begins just now, in another thread, it is read in vain
        return True

    def _add(self, moved: int, seconds: float, heads: dict[str, Head]) -> None:
        with self._lock:
            self.bytes += moved
            self.seconds += seconds
            self.heads.update(heads)

    @property
    def ended(self) -> bool:
        """Tell whether the chunks have come, or never will."""
        return all(task.over for task in self._tasks)


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
        self._numbers = count()  # of readings

    def read(self, asked: Sequence[ExtentChunks], priority: int) -> Reading:
        """Begin to read chunks of some extents, each named once; of an extent without reads, to look up the head. The buffers are the
        store's until `ended`.
        """
        reading = Reading(asked)

        def work(task: Task) -> int:
            task.advance()
            try:
                return self._carry_out(reading, asked, reading._states, task)
            except Abandoned:
                raise
            except StoreError:
                first = 0
                for each in asked:
                    states = memoryview(reading._states)[first : first + len(each.reads)]
                    first += len(each.reads)
                    again = partial(self._read_again, reading, each, states)
                    reading._tasks.append(self._submit(each.extent, task.priority, again, writes=False))
                return 0

        reading._tasks.append(
            Task(f"chunks {next(self._numbers)}", priority, work, move=None, writes=False, ahead=True)
        )
        self._mover.submit(reading._tasks[0])
        return reading

    def _carry_out(self, reading: Reading, asked: Sequence[ExtentChunks], states: States, task: Task) -> int:
        if len(states) and all(state == TAKEN_BACK for state in states):
            return 0
        for each in asked:
            self._stored.rows(each.extent)  # raises: it is gone
        began, heads = time.perf_counter(), {}
        try:
            moved, found = self._tier.read_chunks(asked, states)
            heads = {each.extent: head for each, head in zip(asked, found, strict=True)}
        except Stale as stale:
            reading.stale, moved = True, stale.bytes
        seconds = time.perf_counter() - began
        reading._add(moved, seconds if heads else 0.0, heads)
        self._counters.count(chunk_reads=len(asked), chunk_read_bytes=moved, chunk_read_seconds=seconds)
        if heads:
            task.advance(1)
        return moved

    def _read_again(self, reading: Reading, what: ExtentChunks, states: States, task: Task) -> int:
        """Read of one extent what could not be read with that of others, or while something else was done to the extent."""
        task.advance()
        try:
            return self._carry_out(reading, [what], states, task)
        except StoreError:
            reading.lost = what.extent
            raise

    def has(self, extent: str) -> bool:
        """Tell whether an extent is on disk."""
        return extent in self._stored

    def urge(self, readings: Sequence[Reading]) -> None:
        """Make these reads urgent: a request waits for them now."""
        self._mover.urge([task for reading in readings for task in reading._tasks])

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
