"""Parts of an extent's file: some chunks of a layer, and the same rows in another order (SPEC §IV-B, §IV-D).

Only files of layouts with probe heads are read in parts and rewritten (`store/extents/rewriting.py`). Chunks are numbered by where
they are stored, so a reader names the file that it means by its `edition`: a digest of the head, which contains the
order of the rows and the checksums of all chunks. So a file that was given up and written anew is not taken for the
former one, unless both are the same to the byte.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from afterglow.errors import DamageError, StoreError
from afterglow.store.extents.files import (
    Scratch,
    check_size,
    forget_pages,
    open_direct,
    read_full,
    read_span,
    span_bytes,
)
from afterglow.store.extents.head import Bytes, Head, crc32c, decode_head
from afterglow.store.extents.layout import ALIGNMENT, MEANS, PROBES, KVLayout

TENSORS: Final = ("keys", "values", "probe keys", "means")  # by their number
HEADS_KEPT: Final = 1024  # verified heads in memory: about 30 KiB each for 12 layers and 1,024 rows

Identity = tuple[int, int, int]  # of a file's version: inode, time of its last change, size


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


class ChunkReader:
    """Reads parts of extents' files. Thread-safe as far as no two calls are about one extent at a time."""

    def __init__(self, layout: KVLayout, digest: str, direct: bool) -> None:
        self.layout = layout
        self.digest = digest
        self.direct = direct
        self._scratch = Scratch()
        self._heads: OrderedDict[str, tuple[Identity, Head]] = OrderedDict()

    def read(self, path: str, extent: str, rows: int, reads: Sequence[ChunkRead], edition: str) -> tuple[int, Head]:
        """Carry out `reads`, each verified; return the bytes that come from the file, whole pages, and the head.

        Without reads: return just the head, whatever its edition.

        Raises:
            Stale: the file is of another edition.
            DamageError: a byte is wrong.
            OSError: the file cannot be read.
        """
        fd, direct = open_direct(path, os.O_RDONLY, direct=self.direct)
        try:
            total, head = self._head(fd, extent, rows)
            if reads and head.edition != edition:
                raise Stale(f"extent {extent[:16]} is of edition {head.edition}, not {edition}", total)
            for read in reads:
                total += self._read(fd, rows, read, head)
            if not direct:
                forget_pages(fd)
            return total, head
        finally:
            os.close(fd)

    def forget(self, extent: str) -> None:
        """Forget the head of an extent whose file is gone, or another one."""
        self._heads.pop(extent, None)

    def _head(self, fd: int, extent: str, rows: int) -> tuple[int, Head]:
        status = os.fstat(fd)
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._heads.get(extent)
        if known is not None and known[0] == identity:
            return 0, known[1]
        check_size(fd, self.layout, rows)
        raw = read_span(fd, 0, self.layout.head_bytes(rows), self._scratch)
        head = decode_head(raw.tobytes(), self.layout, self.digest, extent=extent, rows=rows)
        head = replace(head, edition=blake2b(raw.data, digest_size=8).hexdigest())
        self._heads[extent] = identity, head
        if len(self._heads) > HEADS_KEPT:
            self._heads.popitem(last=False)
        return span_bytes(0, raw.nbytes), head

    def _read(self, fd: int, rows: int, read: ChunkRead, head: Head) -> int:
        layout = self.layout
        size = {PROBES: layout.probe_chunk_bytes, MEANS: layout.mean_bytes(rows)}.get(read.kv, layout.part_bytes)
        start = layout.offset(rows, read.layer, read.kv) + read.first * size
        wanted = (read.stop - read.first) * size
        assert sum(into.nbytes for into in read.into) == wanted, (read.first, read.stop)
        if wanted % ALIGNMENT == start % ALIGNMENT == 0 and all(map(_aligned, read.into)):
            total = read_full(fd, read.into, start)
        else:
            from_here = read_span(fd, start, wanted, self._scratch)
            total = span_bytes(start, wanted)
            for into in read.into:
                into[:], from_here = from_here[: into.nbytes], from_here[into.nbytes :]
        parts = head.sidecar.parts if head.sidecar is not None and read.kv < PROBES else None
        table = crcs_of(head, read.layer, read.kv) if parts is None else parts[read.layer, read.kv].tolist()
        part = read.first
        for into in read.into:
            for at in range(0, into.nbytes, size):
                if crc32c(into[at : at + size]) != table[part]:
                    raise DamageError(f"layer {read.layer}, {TENSORS[read.kv]}, part {part}")
                part += 1
        return total


def _aligned(buffer: Bytes) -> bool:
    return buffer.ctypes.data % ALIGNMENT == buffer.nbytes % ALIGNMENT == 0


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
