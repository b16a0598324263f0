"""The work of each kind of move, as the mover's threads carry it out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

from afterglow.config import BLOCK_ROWS
from afterglow.errors import SlowError, StoreError
from afterglow.plan.step import DEMAND, Load, Store
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import ExtentRead, HostArena, runs
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.stored_extents import StoredExtents
from afterglow.store.moving.task import Abandoned, Task

# How many layers of an extent are read at a time while other loads wait for the same threads. All extents of a request are needed
# layer by layer (CachedAttention §3.2.1): read whole, one after another, the first layer of the last one would come
# when nearly everything else has come. Measured on bench-100m with two threads: reads of these sizes reach 86-93 % of the
# bandwidth of whole extents (docs/log.md).
MIN_READ_BYTES: Final = 256 << 10  # below it a read costs more calls than bytes
MAX_READ_BYTES: Final = 2 << 20
MAX_ALONE_BYTES: Final = 32 << 20  # of a read that no load waits for: a load that comes meanwhile waits for it
MIN_READS: Final = 3  # into how many reads an extent is cut that is smaller than all that

Piece = tuple[Sequence[int], int, int]  # slots of a whole extent, first row, stop row
Stretch = tuple[int, int]  # rows [first, stop) of the arena, where row i of slot s is number 64 s + i


def layers_at_once(layout: KVLayout, blocks: int, crowded: bool) -> int:
    """Choose how many layers of `blocks` blocks one read brings, at least one. `crowded`: other loads wait to read beside it."""
    size = 2 * blocks * layout.chunk_bytes
    if not crowded:
        return max(1, MAX_ALONE_BYTES // size)
    return max(1, -(-MIN_READ_BYTES // size), min(-(-layout.layers // MIN_READS), MAX_READ_BYTES // size))


class LoadWork:
    """Reads an extent into host slots, some layers at a time: after each read the thread may go to a load that has come less
    far.
    """

    def __init__(
        self, move: Load, arena: HostArena, stored: StoredExtents, mover: Mover, windowed: Collection[int] = ()
    ) -> None:
        """`windowed`: layers with a sliding window."""
        self._move = move
        self._windowed = windowed
        self._arena = arena
        self._stored = stored
        self._mover = mover
        self._most_s = move.most_s if move.most_s is not None else math.inf
        self.file: str | None = None  # that has the bytes while they are on their way to the disk tier
        self._there = 0  # layers that have been read
        self._read: ExtentRead | None = None

    def run(self, task: Task) -> int:
        """Read until all is there, the gate is closed or another load goes first; return the bytes.

        Raises:
            StoreError: the extent cannot be read. It is dropped if it never can be.
            SlowError: it takes longer than the move allows.
        """
        move, began, layers, moved = self._move, time.perf_counter(), self._arena.layout.layers, 0
        rows = self._stored.rows(move.extent) if self.file is None else move.rows
        tier = self._stored.tier
        assert tier is not None, "extents on disk without a disk tier"
        if self._read is None or self._read.rows != rows:
            self._read = ExtentRead(
                move.extent, rows, self._arena, move.slots, move.skip, self._windowed, file=self.file
            )
        advance = partial(self._advance, task, began)
        try:
            while self._there < (limit := task.limit(layers)):
                count = layers_at_once(self._arena.layout, len(move.slots), self._mover.crowded(task))
                stop = min(limit, self._there + count)
                moved += tier.read(self._read, advance, self._there, stop)
                self._there = stop
                advance(self._there)
                if self._there < limit and self._mover.overtaken(task):
                    break
            if self._there < layers:
                task.pause()
            return moved
        except (Abandoned, SlowError):
            raise
        except StoreError as error:
            if self.file is None:
                self._stored.drop_lost(move.extent, error)
            raise

    def _advance(self, task: Task, began: float, done: int) -> None:
        task.advance(done)
        layers = self._arena.layout.layers
        seconds = task.seconds + time.perf_counter() - began
        if seconds > self._most_s and done < layers and task.priority != DEMAND:
            task.bytes = self._arena.layout.file_bytes(self._move.rows) * done // layers
            raise SlowError(f"{done} of {layers} layers in {seconds:.3f} s")


def store_extent(move: Store, arena: HostArena, stored: StoredExtents, task: Task) -> int:
    """Write host slots as an extent, its file first, then its row in the catalog: all or nothing; return the bytes.

    Raises:
        StoreError: it cannot be written.
    """
    if stored.tier is None:
        raise StoreError("there is no disk tier")
    record = stored.sized(move.record)
    written = stored.tier.write(record, arena, move.slots, task.advance)
    stored.add(record, task.advance)
    return written


def drop_extent(extent: str, stored: StoredExtents, _: Task) -> int:
    """Remove an extent's row and file from the disk; return 0 bytes.

    Raises:
        StoreError: the row or the file cannot be removed.
    """
    stored.remove(extent)
    return 0


def sweep_extent(extent: str, stored: StoredExtents, swept: Callable[[], None], _: Task) -> int:
    """Remove a file without a row that was found at the start, unless the extent was stored again since then (the mover keeps
    the order); return 0 bytes. `swept` is called when the file has been removed.

    Raises:
        StoreError: it cannot be removed.
    """
    if stored.tier is not None and extent not in stored:
        stored.tier.delete(extent)
        swept()
    return 0


def copy_rows(
    arena: HostArena,
    pieces: Sequence[Piece],
    slots: Sequence[int],
    rows: int,
    layer_done: Callable[[int], None],
) -> int:
    """Make the pieces, one after another, rows [0, rows) of the blocks in `slots`; returns the bytes copied. So the rows that a truncated
    conversation keeps become an extent of their own.

    All layers, keys and values; the rows of the last block beyond `rows` are zeroed. `layer_done(n)` before the first
    layer and after each: the first n are in place. Where it raises, nothing more is written. Raises StoreError, before anything is written, where slots and rows do not agree or a slot
    is both read and written.
    """
    _check(arena, pieces, slots, rows)
    target = _stretches(slots, 0, rows)
    source = [stretch for piece in pieces for stretch in _stretches(*piece)]
    spans = list(_spans(source, target))
    layer_done(0)  # the slots of a task that was given up have a new owner
    arena.zero_tail(slots, rows)
    layout = arena.layout
    flat = arena.rows.reshape(layout.layers, 2, arena.slots * BLOCK_ROWS, layout.row_bytes)
    for layer in range(layout.layers):
        for read, written, count in spans:
            flat[layer, :, written : written + count] = flat[layer, :, read : read + count]
        layer_done(layer + 1)
    return rows * layout.row_bytes * 2 * layout.layers


def _check(arena: HostArena, pieces: Sequence[Piece], slots: Sequence[int], rows: int) -> None:
    for own, first, stop in pieces:
        if not 0 <= first < stop <= len(own) * BLOCK_ROWS:
            raise StoreError(f"rows [{first}, {stop}) are not in {len(own)} slots")
    total = sum(stop - first for _, first, stop in pieces)
    if rows < 1 or total != rows or len(slots) != arena.layout.blocks(rows):
        raise StoreError(f"{len(slots)} slots and pieces of {total} rows cannot make an extent of {rows} rows")
    read = {slot for own, _, _ in pieces for slot in own}
    if not all(0 <= slot < arena.slots for slot in read.union(slots)):
        raise StoreError(f"a slot is outside the {arena.slots} of the arena")
    if len(set(slots)) != len(slots) or not read.isdisjoint(slots):
        raise StoreError("a slot is written twice, or both read and written")


def _stretches(slots: Sequence[int], first: int, stop: int) -> list[Stretch]:
    """Where rows [first, stop) of the blocks in `slots` lie, in order; consecutive slots make one stretch."""
    stretches = []
    at = 0  # row of the first slot of the run
    for a, b in runs(slots):
        end = at + (b - a) * BLOCK_ROWS
        lower, upper = max(first, at), min(stop, end)
        if lower < upper:
            shift = a * BLOCK_ROWS - at
            stretches.append((lower + shift, upper + shift))
        at = end
    return stretches


def _spans(source: Sequence[Stretch], target: Sequence[Stretch]) -> Iterator[tuple[int, int, int]]:
    """(row to read from, row to write to, count): both lists, of as many rows, cut where either has a cut."""
    reads = iter(source)
    a, a_end = 0, 0
    for b, b_end in target:
        while b < b_end:
            if a == a_end:
                a, a_end = next(reads)
            count = min(a_end - a, b_end - b)
            yield a, b, count
            a, b = a + count, b + count
