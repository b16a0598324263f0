"""Which tensors of an extent's file move in one call, and the memory of the arena that they move from or to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from afterglow.store.extents.files import IOV_MAX
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import ExtentRead, HostArena, runs

READ_BYTES: Final = 4 << 20  # small layers are read together up to this; more gains nothing and delays layer 0
SUMMED_READ_BYTES: Final = 8 << 20  # where the compiled kernels read: they cut it up by themselves
WRITE_BYTES: Final = 4 << 20

Tensors = list[tuple[int, int]]  # (layer, kv) of tensors that lie side by side in the file and move in one call


def pieces(layout: KVLayout, rows: int, span: int, slots: Sequence[int], limit: int) -> Iterator[Tensors]:
    """Yield all tensors in file order, joined where neighbours fit one call of about `limit` bytes. `span`: bytes of a tensor
    that move.

    A layer's keys and values always go together: one is of no use without the other, and every call costs
    this thread the interpreter lock, which a busy thread gives back only after milliseconds.
    """
    most = 1
    if span == layout.tensor_bytes(rows):  # neighbours, without a gap between them
        segments = sum(1 for _ in runs(slots))
        most = max(1, min(limit // span, IOV_MAX // segments) // 2) * 2
    tensors = [(layer, kv) for layer in range(layout.layers) for kv in (0, 1)]
    for start in range(0, len(tensors), most):
        yield tensors[start : start + most]


def cut(parts: Sequence[Tensors], read: ExtentRead) -> list[Tensors]:
    """Cut pieces so that tensors whose first blocks are left out move alone, and those of which nothing is left do not."""
    found: list[Tensors] = []
    for part in parts:
        for whole, tensors in groupby(part, lambda tensor: not read.skipped(tensor[0])):
            if whole:
                found.append(list(tensors))
            elif read.skip < len(read.slots):
                found += [[tensor] for tensor in tensors]
    return found


def arena_buffers(tensors: Tensors, arena: HostArena, slots: Sequence[int]) -> list[Bytes]:
    """Views of the arena in the order of the file; a run of consecutive slots is one buffer."""
    stretches = list(runs(slots))
    planes = [arena.plane(layer, kv) for layer, kv in tensors]
    return [plane[a:b] for plane in planes for a, b in stretches]
