"""Copies new rows into host slots: one thread, first come, first served. Knows drafts only as numbers.

It is a thread of its own, because a copy into memory should not wait for a disk that is busy or hangs. What waits
for it is the write buffer (CachedAttention §3.2.2): where that is full, whoever brings more rows waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from afterglow.config import BLOCK_ROWS
from afterglow.plan.step import SaveDone
from afterglow.store.extent import Bytes
from afterglow.store.tier import HostArena

log = logging.getLogger("afterglow.store")

WRITE_BUFFER: Final = 256 * 1024**2

Work = Callable[[], None]


class RowSaver:
    """`report(done, bytes, seconds)` is called once per group of rows, when all layers of it have come in:
    `ok` if every one of them was copied. A group is named by its draft and first row.

    While more than `limit_bytes` would wait to be copied, a save blocks its caller, first come, first served; one that
    is larger than the limit goes when nothing else waits. `waits` and `wait_seconds` count that.
    """

    def __init__(
        self,
        arena: HostArena,
        report: Callable[[SaveDone, int, float], None],
        limit_bytes: int = WRITE_BUFFER,
    ) -> None:
        self.waits = 0
        self.wait_seconds = 0.0
        self._arena = arena
        self._report = report
        self._limit = limit_bytes
        self._groups: dict[tuple[int, int], list[int]] = {}  # (draft, first row) -> [layers done, failed, ns]
        self._queue: deque[tuple[Work, int]] = deque()  # and the bytes of each
        self._there = threading.Condition()
        self._buffered = 0  # bytes in the queue, and of the copy that runs
        self._line: deque[object] = deque()  # callers that wait for room
        self._busy = False
        self._closed = False
        self._ended = False  # the thread takes nothing more
        self._groups_lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="afterglow-saver", daemon=True)
        self._thread.start()

    def save(
        self,
        draft: int,
        layer: int,
        slots: Sequence[int],
        first_row: int,
        keys: Bytes,
        values: Bytes,
    ) -> None:
        """Copy one layer's rows; uint8 [rows, row_bytes] each, the saver's own until they are copied."""

        def copy() -> None:
            for (a, b), place in self._places(slots, first_row, len(keys)):
                self._arena.rows[(layer, 0, *place)] = keys[a:b]
                self._arena.rows[(layer, 1, *place)] = values[a:b]

        self._run(draft, first_row, len(keys), 1, copy, keys.nbytes + values.nbytes)

    def save_block(self, draft: int, slots: Sequence[int], first_row: int, block: Bytes) -> None:
        """Copy rows of all layers at once; uint8 [layers, 2, rows, row_bytes]."""
        rows = block.shape[2]

        def copy() -> None:
            for (a, b), place in self._places(slots, first_row, rows):
                self._arena.rows[(slice(None), slice(None), *place)] = block[:, :, a:b]

        self._run(draft, first_row, rows, self._arena.layout.layers, copy, block.nbytes)

    def pending(self) -> int:
        """Copies that wait for room, are queued, or run."""
        with self._there:
            return self._pending()

    def close(self) -> None:
        """Let in whoever waits for room, do what is queued, then end the thread. Later saves are copied by their
        callers.
        """
        with self._there:
            self._closed = True
            self._there.notify_all()
        self._thread.join()

    # -------------------------------------------------------------------------------------------------

    @staticmethod
    def _places(slots: Sequence[int], first_row: int, rows: int) -> list[tuple[tuple[int, int], tuple[int, slice]]]:
        """(rows of the source, (slot, rows of the slot)) for each slot that the rows touch."""
        places = []
        done = 0
        while done < rows:
            block, at = divmod(first_row + done, BLOCK_ROWS)
            count = min(BLOCK_ROWS - at, rows - done)
            places.append(((done, done + count), (slots[block], slice(at, at + count))))
            done += count
        return places

    def _run(self, draft: int, first_row: int, rows: int, layers: int, copy: Work, size: int) -> None:
        """Copy `size` bytes in the saver's thread; in this one when that has ended."""

        def work() -> None:
            start = time.perf_counter_ns()
            failed = False
            try:
                copy()
            except Exception:
                # Wrong shapes or slots are mistakes of the caller; the rows are lost, the server is not.
                log.exception("rows [%d, %d) of draft %d could not be saved", first_row, first_row + rows, draft)
                failed = True
            self._count(draft, first_row, rows, layers, failed, time.perf_counter_ns() - start)

        if not self._enqueue(work, size):
            work()

    def _enqueue(self, work: Work, size: int) -> bool:
        """Queue a copy as soon as there is room; False: nobody would take it from the queue any more."""
        me = object()

        def room() -> bool:
            fits = not self._buffered or self._buffered + size <= self._limit
            return self._closed or (fits and self._line[0] is me)

        with self._there:
            if self._ended:
                return False
            self._line.append(me)
            try:
                if not room():
                    self.waits += 1
                    start = time.perf_counter()
                    self._there.wait_for(room)
                    self.wait_seconds += time.perf_counter() - start
                self._queue.append((work, size))
                self._buffered += size
            finally:  # also when the caller is interrupted: nobody gets past one who has left the line
                self._line.remove(me)
                self._there.notify_all()
            return True

    def _pending(self) -> int:
        return len(self._line) + len(self._queue) + self._busy

    def _count(self, draft: int, first_row: int, rows: int, layers: int, failed: bool, spent: int) -> None:
        layout = self._arena.layout
        with self._groups_lock:
            group = self._groups.setdefault((draft, first_row), [0, 0, 0])
            group[0] += layers
            group[1] += failed
            group[2] += spent
            if group[0] < layout.layers:
                return
            self._groups.pop((draft, first_row))
        ok = not group[1]
        moved = rows * layout.row_bytes * 2 * layout.layers if ok else 0
        self._report(SaveDone(draft, first_row, rows, ok), moved, group[2] / 1e9)

    def _work(self) -> None:
        size = 0
        while True:
            with self._there:
                self._busy = False
                self._buffered -= size
                if self._line or not self._queue:
                    self._there.notify_all()
                self._there.wait_for(lambda: self._queue or (self._closed and not self._line))
                if not self._queue:
                    self._ended = True
                    return
                work, size = self._queue.popleft()
                self._busy = True
            work()
            del work  # it holds the rows, and the next one may be long in coming
