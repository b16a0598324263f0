"""Rows from host slots to other host slots: the rows that a truncated conversation keeps become an extent of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from afterglow.config import BLOCK_ROWS
from afterglow.errors import StoreError
from afterglow.store.extents.tier import HostArena, runs

Piece = tuple[Sequence[int], int, int]  # slots of a whole extent, first row, stop row
Stretch = tuple[int, int]  # rows [first, stop) of the arena, where row i of slot s is number 64 s + i


def copy_rows(
    arena: HostArena,
    pieces: Sequence[Piece],
    slots: Sequence[int],
    rows: int,
    layer_done: Callable[[int], None],
) -> int:
    """Make the pieces, one after another, rows [0, rows) of the blocks in `slots`; returns the bytes copied.

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
