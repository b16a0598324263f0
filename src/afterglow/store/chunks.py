"""Parts of an extent's file: some chunks of a layer, and the same rows in another order (SPEC §IV-B, §IV-D; spec S9, S12).

Only files of layouts with probe heads are read in parts and rewritten. A rewriting makes a new version of the file and
renames it over the old one; chunks are numbered by where they are stored, so whoever asks for some says which version it
has in mind.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from afterglow.errors import DamageError, StoreError
from afterglow.store.extent import Bytes, Head, Sidecar, crc32c, decode_head
from afterglow.store.files import Scratch, forget_pages, open_direct, read_full
from afterglow.store.layout import ALIGNMENT, KEYS, PROBES, VALUES, KVLayout, align_up

TENSORS: Final = ("keys", "values", "probe keys")  # by their number
HEADS_KEPT: Final = 1024  # verified heads in memory: about 30 KiB each for 12 layers and 1,024 rows

Identity = tuple[int, int, int]  # of a file's version: inode, time of its last change, size


class Stale(StoreError):
    """The file has been rewritten: chunks have other numbers now. Ask for its head again."""


class ChunkRead(NamedTuple):
    """Chunks [first, stop) of a layer's keys (kv 0), values (1) or probe keys (2), as they are stored, into `into`: one after
    the other, uint8 [bytes] each, of one or more whole chunks."""

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

    def read(self, path: str, extent: str, rows: int, reads: Sequence[ChunkRead], version: int) -> tuple[int, Head]:
        """Carry out `reads`, each verified; returns the bytes read and the head. With no reads: just the head, whatever
        its version. Raises Stale where the file is of another version, DamageError and OSError.
        """
        fd, direct = open_direct(path, os.O_RDONLY, direct=self.direct)
        try:
            total, head = self._head(fd, extent, rows)
            if reads and head.sidecar is not None and head.sidecar.version != version:
                raise Stale(f"extent {extent[:16]} is of version {head.sidecar.version}, not {version}")
            for read in reads:
                total += self._read(fd, rows, read, head)
            if not direct:
                forget_pages(fd)
            return total, head
        finally:
            os.close(fd)

    def forget(self, extent: str) -> None:
        """Its file is gone, or about to be."""
        self._heads.pop(extent, None)

    def _head(self, fd: int, extent: str, rows: int) -> tuple[int, Head]:
        status = os.fstat(fd)
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._heads.get(extent)
        if known is not None and known[0] == identity:
            return 0, known[1]
        if status.st_size != self.layout.file_bytes(rows):
            raise DamageError(
                f"{status.st_size} bytes long instead of the {self.layout.file_bytes(rows)} of {rows} rows"
            )
        raw = self._scratch.take(self.layout.head_bytes(rows))
        size = read_full(fd, [raw], 0)
        head = decode_head(raw.tobytes(), self.layout, self.digest, extent=extent, rows=rows)
        self._heads[extent] = identity, head
        if len(self._heads) > HEADS_KEPT:
            self._heads.popitem(last=False)
        return size, head

    def _read(self, fd: int, rows: int, read: ChunkRead, head: Head) -> int:
        layout = self.layout
        size = layout.probe_chunk_bytes if read.kv == PROBES else layout.chunk_bytes
        start = layout.offset(rows, read.layer, read.kv, read.first)
        wanted = (read.stop - read.first) * size
        assert sum(into.nbytes for into in read.into) == wanted, (read.first, read.stop)
        if wanted % ALIGNMENT == start % ALIGNMENT == 0 and all(map(_aligned, read.into)):
            total = read_full(fd, read.into, start)
        else:
            begin = start // ALIGNMENT * ALIGNMENT
            bounce = self._scratch.take(align_up(start + wanted) - begin)
            total = read_full(fd, [bounce], begin)
            from_here = bounce[start - begin :]
            for into in read.into:
                into[:], from_here = from_here[: into.nbytes], from_here[into.nbytes :]
        table, chunk = crcs_of(head, read.layer, read.kv), read.first
        for into in read.into:
            for at in range(0, into.nbytes, size):
                if crc32c(into[at : at + size]) != table[chunk]:
                    raise DamageError(f"layer {read.layer}, {TENSORS[read.kv]}, chunk {chunk}")
                chunk += 1
        return total


def _aligned(buffer: Bytes) -> bool:
    return buffer.ctypes.data % ALIGNMENT == buffer.nbytes % ALIGNMENT == 0


def crcs_of(head: Head, layer: int, kv: int) -> list[int]:
    """Checksums of a layer's keys, values or probe keys, by chunk."""
    if kv == PROBES:
        assert head.sidecar is not None, "a layout without probe heads"
        return [int(crc) for crc in head.sidecar.crcs[layer]]
    return [int(crc) for crc in head.crcs[layer, kv]]


def in_text_order(stored: Bytes, order: npt.NDArray[np.uint16]) -> Bytes:
    """Rows as they are stored, uint8 [padded, row bytes], back in the order of the text: a copy."""
    text = np.empty_like(stored)
    text[order] = stored
    return text


def reordered(
    layout: KVLayout, rows: int, tensors: Sequence[Bytes], orders: npt.NDArray[np.uint16], before: Head
) -> tuple[list[Bytes], npt.NDArray[np.uint32], Sidecar]:
    """One layer after the other in another order: all tensors of a file, in the order of the text, become those of its
    next version, with their checksums.

    `tensors`: keys and values of each layer, uint8 [padded, row bytes]. `orders` uint16 [layers, rows]: which row goes
    where. Probe keys are made from the keys.
    """
    padded, chunks = layout.padded_rows(rows), layout.file_chunks(rows)
    order = np.tile(np.arange(padded, dtype=np.uint16), (layout.layers, 1))
    order[:, :rows] = orders
    made = [tensor[order[at // 2]] for at, tensor in enumerate(tensors)]
    probes = [
        np.ascontiguousarray(made[2 * layer + KEYS][:, : layout.probe_row_bytes]) for layer in range(layout.layers)
    ]
    crcs = np.array([_crcs(tensor, chunks) for tensor in made], np.uint32).reshape(layout.layers, VALUES + 1, chunks)
    assert before.sidecar is not None
    sidecar = Sidecar(
        np.array([_crcs(probe, chunks) for probe in probes], np.uint32), order, before.sidecar.version + 1
    )
    return [*made, *probes], crcs, sidecar


def _crcs(tensor: Bytes, chunks: int) -> list[int]:
    return [crc32c(chunk) for chunk in tensor.reshape(chunks, -1)]
