"""Parts of an extent's file: some chunks of a layer, and the same rows in another order (SPEC §IV-B, §IV-D).

Only files of layouts with probe heads are read in parts (`chunk_reader`) and rewritten (`rewriting`). Chunks are numbered by where
they are stored, so a reader names the file that it means by its `edition`: a digest of the head, which contains the
order of the rows and the checksums of all chunks. So a file that was given up and written anew is not taken for the
former one, unless both are the same to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from afterglow.errors import StoreError
from afterglow.store.extents.head import Bytes, Head
from afterglow.store.extents.layout import PROBES

TENSORS: Final = ("keys", "values", "probe keys", "means")  # by their number

# States of a read of chunks. Its owner may set TAKEN_BACK where WANTED is, at any time; the reader sets the others.
WANTED, TAKEN_BACK, BEGUN, LEFT_OUT = range(4)
States = bytearray | memoryview  # one byte a read


class Stale(StoreError):
    """Says that the file is another one now, with other chunk numbers: ask for its head again. `bytes`: those read to learn that."""

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message)
        self.bytes = num_bytes


class ChunkRead(NamedTuple):
    """Names parts [first, stop) of a layer's keys (kv 0) or values (1), chunks of its probe keys (2), or its means (3), one piece, as they
    are stored, and the buffers to fill: `into`, one after the other, uint8 [bytes] each, of one or more whole parts. A part is a chunk, unless the
    layout has smaller ones.
    """

    layer: int
    kv: int
    first: int
    stop: int
    into: Sequence[Bytes]


class ExtentChunks(NamedTuple):
    """Says what to read of an extent of `rows` rows, whose file is of this edition. Without reads: just its head, whatever its edition."""

    extent: str
    rows: int
    edition: str
    reads: Sequence[ChunkRead]


def crcs_of(head: Head, layer: int, kv: int) -> list[int]:
    """Return the checksums of a layer's keys, values or probe keys, by chunk; of its means, the one that they have."""
    if kv >= PROBES:
        assert head.sidecar is not None, "a layout without probe heads"
        table = head.sidecar.crcs if kv == PROBES else head.sidecar.means
        assert table is not None, "a layout without means"
        return [int(crc) for crc in table[layer].reshape(-1)]
    return [int(crc) for crc in head.crcs[layer, kv]]


def in_text_order(stored: Bytes, order: npt.NDArray[np.uint16]) -> Bytes:
    """Copy rows as they are stored, uint8 [padded, row bytes], back into the order of the text."""
    text = np.empty_like(stored)
    text[order] = stored
    return text
