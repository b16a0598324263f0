"""Copies new rows into host slots, in one thread, first come, first served; or counts those that a device has put there. Knows drafts only as
numbers.

The thread is not one of the mover's, because a copy into memory should not wait for a disk that is busy or hangs. The copies
that wait for it are the write buffer (CachedAttention §3.2.2): where that is full, callers with more rows wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from afterglow.config import BLOCK_ROWS, WRITE_BUFFER
from afterglow.plan.step import SaveDone
from afterglow.plan.tiers.buffers import write_buffer_bytes
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.tier import HostArena
from afterglow.store.worker import Worker

log = logging.getLogger("afterglow.store")

FORGET: Final = 0.95  # weight of what a copy took after each later one
LEAST_LAYERS: Final = 2  # of the rows that are computed: one is copied while the next one comes

SaveReport = Callable[[SaveDone, int, float], None]


@dataclass(slots=True)
class _Group:
    """The rows of a draft that come together, layer by layer."""

    layers: int = 0
    failed: int = 0
    ns: int = 0


def slot_runs(slots: Sequence[int], first_row: int, rows: int) -> list[tuple[int, int, int]]:
    """List where `rows` rows of a draft go, from its row `first_row` on: rows [start, stop) of these, and the row of all slots' rows that the
    first of them becomes. `slots`: of the draft. Rows in neighbouring slots are one run."""
    found: list[tuple[int, int, int]] = []
    done = 0
    while done < rows:
        block, at = divmod(first_row + done, BLOCK_ROWS)
        stop = min(done + BLOCK_ROWS - at, rows)
        to = slots[block] * BLOCK_ROWS + at
        if found and found[-1][2] + done - found[-1][0] == to:
            start, _, to = found.pop()
            found.append((start, stop, to))
        else:
            found.append((done, stop, to))
        done = stop
    return found


class RowSaver:
    """Calls `report(done, bytes, seconds)` once per group of rows, when all layers of the group have come in: `ok` if every layer
    was copied. A group is named by its draft and first row.

    While more than `limit_bytes` would wait to be copied, a save blocks its caller, first come, first served; a save that is
    larger than the limit goes when nothing else waits. `waits` and `wait_seconds` count that.
    """

    def __init__(self, arena: HostArena, report: SaveReport, limit_bytes: int = WRITE_BUFFER) -> None:
        self.waits = 0
        self.wait_seconds = 0.0
        self._arena = arena
        self._report = report
        self.limit = self._most = limit_bytes  # how large the buffer is, and may be
        self._copied = (0.0, 0.0)  # bytes and seconds of copies, later ones counting more
        self._groups: dict[tuple[int, int], _Group] = {}  # by draft and first row
        self._groups_lock = threading.Lock()
        self._room = threading.Condition()
        self._line: deque[object] = deque()  # callers that wait for room
        self._copies = 0  # that are queued, or run
        self._buffered = 0  # their bytes
        self._closed = False
        self._worker = Worker("afterglow-saver", self._carry_out)

    def save(
        self,
        draft: int,
        layer: int,
        slots: Sequence[int],
        first_row: int,
        keys: Bytes,
        values: Bytes,
    ) -> None:
        """Copy one layer's rows into a draft's slots: rows [first_row, first_row + len(keys)) of the draft.

        `keys` and `values` are uint8 [rows, row_bytes] and belong to the saver until copied. `slots` are the
        draft's, from its first row on. One SaveDone follows the last layer. Waits while the write buffer is full.
        """

        def copy() -> None:
            for start, stop, to in slot_runs(slots, first_row, len(keys)):
                self._arena.slot_rows[layer, 0, to : to + stop - start] = keys[start:stop]
                self._arena.slot_rows[layer, 1, to : to + stop - start] = values[start:stop]

        self._run(draft, first_row, len(keys), 1, copy, keys.nbytes + values.nbytes)

    def save_block(self, draft: int, slots: Sequence[int], first_row: int, block: Bytes) -> None:
        """The same for all layers at once: `block` is uint8 [layers, 2, rows, row_bytes]."""
        rows = block.shape[2]

        def copy() -> None:
            for start, stop, to in slot_runs(slots, first_row, rows):
                self._arena.slot_rows[:, :, to : to + stop - start] = block[:, :, start:stop]

        self._run(draft, first_row, rows, self._arena.layout.layers, copy, block.nbytes)

    def placed(self, draft: int, first_row: int, rows: int, layers: int, seconds: float = 0.0) -> None:
        """Say that rows of a draft have come to their slots, in so many layers, without the saver: in `seconds`."""
        self._count(draft, first_row, rows, layers, False, int(seconds * 1e9))

    def lose(self, draft: int, first_row: int, rows: int, layers: int) -> None:
        """Say that rows of a draft, in so many layers, never come: their SaveDone says that they could not be saved."""
        self._count(draft, first_row, rows, layers, True, 0)

    def expect(self, rows: int, computing: float) -> None:
        """Give the buffer the size that `rows` rows need that are about to be computed, in `computing` seconds after their first
        layer, at the rate of the copies so far. All that it may have, before there is a rate or a time.
        """
        layout = self._arena.layout
        with self._room:
            size, (copied, seconds) = rows * layout.row_bytes * 2 * layout.layers, self._copied
            if computing > 0 and seconds > 0:
                least = size * LEAST_LAYERS // layout.layers
                size = max(least, write_buffer_bytes(size, copied / seconds, computing))
                self.limit = max(1, min(self._most, size))
            else:
                self.limit = self._most
            self._room.notify_all()

    def pending(self) -> int:
        """Count the copies that wait for room, are queued, or run."""
        with self._room:
            return len(self._line) + self._copies

    def close(self) -> None:
        """Let in the callers that wait for room, do all copies, then end the thread. Later saves are copied by their callers."""
        with self._room:
            self._closed = True
            self._room.notify_all()
            self._room.wait_for(lambda: not self._line)
        self._worker.close()

    # -------------------------------------------------------------------------------------------------

    def _run(self, draft: int, first_row: int, rows: int, layers: int, copy: Callable[[], None], size: int) -> None:
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

    def _enqueue(self, work: Callable[[], None], size: int) -> bool:
        """Queue a copy as soon as there is room; False: the thread takes no more."""
        me = object()

        def room() -> bool:
            fits = not self._buffered or self._buffered + size <= self.limit
            return self._closed or (fits and self._line[0] is me)

        with self._room:
            self._line.append(me)
            try:
                if not room():
                    self.waits += 1
                    start = time.perf_counter()
                    self._room.wait_for(room)
                    self.wait_seconds += time.perf_counter() - start
                taken = self._worker.put((work, size))
                if taken:
                    self._buffered += size
                    self._copies += 1
                return taken
            finally:  # also when the caller is interrupted: a caller that has left the line holds up no other
                self._line.remove(me)
                self._room.notify_all()

    def _count(self, draft: int, first_row: int, rows: int, layers: int, failed: bool, ns: int) -> None:
        layout = self._arena.layout
        with self._groups_lock:
            group = self._groups.setdefault((draft, first_row), _Group())
            group.layers += layers
            group.failed += failed
            group.ns += ns
            if group.layers < layout.layers:
                return
            self._groups.pop((draft, first_row))
        ok = not group.failed
        moved = rows * layout.row_bytes * 2 * layout.layers if ok else 0
        if ok and group.ns:
            with self._room:
                copied, seconds = self._copied
                self._copied = FORGET * copied + moved, FORGET * seconds + group.ns / 1e9
        self._report(SaveDone(draft, first_row, rows, ok), moved, group.ns / 1e9)

    def _carry_out(self, copies: deque[tuple[Callable[[], None], int]]) -> None:
        while copies:
            work, size = copies.popleft()
            work()
            del work  # it holds the rows, and the next copy may be long in coming
            with self._room:
                self._copies -= 1
                self._buffered -= size
                if self._line:
                    self._room.notify_all()
