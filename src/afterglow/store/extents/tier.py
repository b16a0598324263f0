"""The protocol of byte tiers, and the host arena that they fill and empty. No policy: the plan decides
slots.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from afterglow.config import BLOCK_ROWS
from afterglow.errors import ConfigError
from afterglow.plan.step import ExtentRecord
from afterglow.store.extents.chunks import ExtentChunks, States
from afterglow.store.extents.head import Bytes, Head
from afterglow.store.extents.layout import ALIGNMENT, KVLayout
from afterglow.store.extents.rewriting import Ranks, Rewriting

Buffer = memoryview | bytearray | mmap.mmap | npt.NDArray[np.uint8]


def arena_bytes(layout: KVLayout, slots: int) -> int:
    """Bytes that the buffer of an arena needs."""
    return slots * layout.block_bytes


class HostArena:
    """One writable buffer as slots, layer-major: `[layers, 2, slots, chunk_bytes]`.

    Consecutive slots are therefore consecutive rows of one layer's keys: an extent whose slots are a run
    needs no gathering. The buffer is the caller's, who keeps it alive; 4096-aligned it lets reads go straight
    into it.
    """

    def __init__(self, layout: KVLayout, slots: int, buffer: Buffer) -> None:
        flat: Bytes = np.frombuffer(buffer, np.uint8) if slots else np.empty(0, np.uint8)
        need = arena_bytes(layout, slots)
        if flat.nbytes < need:
            raise ConfigError(f"an arena of {slots} slots needs {need} bytes, the buffer has {flat.nbytes}")
        if not flat.flags.writeable:
            raise ConfigError("the arena's buffer is read-only")
        self.layout = layout
        self.slots = slots
        self.view: Bytes = flat[:need].reshape(layout.layers, 2, slots, layout.chunk_bytes)
        self.rows: Bytes = self.view.reshape(layout.layers, 2, slots, BLOCK_ROWS, layout.row_bytes)
        self.slot_rows: Bytes = self.view.reshape(layout.layers, 2, slots * BLOCK_ROWS, layout.row_bytes)
        # `whole`: no tensor in a file has more chunks than an extent's blocks. What the compiled kernels read needs no more. Python's
        # direct I/O also wants memory, length and file offset aligned; otherwise transfers pass through a bounce buffer.
        self.whole = layout.padded_rows(1) == BLOCK_ROWS
        self.address = flat.ctypes.data
        self.planes = layout.layers * 2
        self.chunk_bytes = layout.chunk_bytes
        self.aligned = layout.aligned and self.whole and self.address % ALIGNMENT == 0

    def plane(self, layer: int, kv: int) -> Bytes:
        """One layer's keys (kv 0) or values (kv 1) in all slots: uint8 [slots, chunk_bytes], a view."""
        plane: Bytes = self.view[layer, kv]
        return plane

    def zero_tail(self, slots: Sequence[int], rows: int) -> None:
        """Blank the rows of the last slot that lie beyond the extent's `rows`.

        They hold bytes of the slot's last owner, which must not reach the disk. No reader uses them.
        """
        if rows % BLOCK_ROWS:
            self.rows[:, :, slots[-1], rows % BLOCK_ROWS :] = 0


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive slots as (first, end) pairs: `[4, 5, 6, 9]` -> `(4, 7), (9, 10)`."""
    start = previous = slots[0]
    for slot in slots[1:]:
        if slot != previous + 1:
            yield start, previous + 1
            start = slot
        previous = slot
    yield start, previous + 1


@dataclass(slots=True, eq=False)
class ExtentRead:
    """A read of the first `len(slots)` blocks of an extent of `rows` rows, all layers at once or some at a time. The layers
    `windowed` leave out the first `skip` blocks: these slots keep what they hold there."""

    extent: str
    rows: int
    arena: HostArena
    slots: Sequence[int]
    skip: int = 0
    windowed: Collection[int] = ()
    head: Head | None = None  # verified, once some layer has been read
    file: str | None = None  # that has the bytes before they are an extent's on this tier

    def skipped(self, layer: int) -> int:
        """Count the blocks that a layer leaves out."""
        return self.skip if layer in self.windowed else 0


class Tier(Protocol):
    """Holds whole extents, below the host. One method call per extent; calls may come from several threads, never two
    at a time for the same extent.

    Raises:
        DamageError: bytes are not those that were written.
        StoreError: anything else goes wrong (an extent that is not there, I/O errors, no space). No other exception
            leaves an implementation.
    """

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store the blocks in `slots` as one whole extent or not at all; return the bytes written.

        `progress` is called after every piece and before the extent becomes visible; when it raises, the
        write is undone and the exception passes through.
        """

    def read(self, read: ExtentRead, layer_done: Callable[[int], None], first: int = 0, stop: int | None = None) -> int:
        """Fill slots with the first blocks of an extent; returns the bytes read.

        Only layers [first, stop) are read (`stop` None: to the last). `layer_done(n)` is called after each piece: the layers
        from `first` up to n are in place and verified. The head counts with layer 0, however often it is read, so that the
        bytes of an extent's reads add up to those of the whole.
        """

    def read_chunks(self, asked: Sequence[ExtentChunks], states: States | None = None) -> tuple[int, list[Head]]:
        """Some chunks of extents of a layout with probe heads, each verified: the bytes read, and each extent's head.

        `states`: of all reads in order; one that is taken back before it has begun is left out. Raises `Stale` when a file is of another
        edition than is asked for. May be called while the extents are read, written or deleted; what it raises then may be no more true.
        """

    def rewriting(
        self, extent: str, rows: int, ranks: Ranks, carried: Callable[[int], None] | None = None
    ) -> Rewriting:
        """Begin to store the rows in another order (SPEC §IV-D): a new version of the file, beside the old one until it is
        published. `ranks` makes uint16 [layers, rows]: which row of the text goes to each place. May be called while the
        extent is read or written; only publishing may not. `carried` is told of each layer's bytes.
        """

    def rewritten(self, extent: str) -> None:
        """A new version has been published."""

    def head(self, extent: str) -> Head:
        """The verified head of an extent."""

    def delete(self, extent: str) -> None:
        """Remove an extent; one that is not there is no error."""

    def extents(self) -> Iterator[str]:
        """The ids of all extents that are there, verified or not."""
