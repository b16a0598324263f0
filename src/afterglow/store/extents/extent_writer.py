"""Writes extents: host slots to one file each, complete or not at all.

A file is written under a temporary name and renamed when it is complete. There is no fsync: a killed process loses no page
cache, and the checksums catch what a power failure tears.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from afterglow.config import BLOCK_ROWS
from afterglow.errors import StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.extents import pieces
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.files import Scratch, forget_pages, write_full
from afterglow.store.extents.head import Bytes, Sidecar, crc32c, encode_head
from afterglow.store.extents.layout import KEYS, PROBES, KVLayout
from afterglow.store.extents.pieces import Tensors, arena_buffers
from afterglow.store.extents.tier import HostArena

Checksums = Callable[[], list[list[int]]]  # waits for those of some tensors: by tensor, by chunk


class ExtentWriter:
    """Writes extents of one layout into one folder."""

    def __init__(self, folder: ExtentFolder, layout: KVLayout, digest: str, checksums: Executor) -> None:
        """`checksums`: computes them while this thread sits in system calls."""
        self._folder = folder
        self._layout = layout
        self._digest = digest
        self._checksums = checksums
        self._scratch = Scratch()
        self._heads = Scratch()
        self._blank_crc = crc32c(bytes(layout.chunk_bytes))

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store the blocks in `slots` as the extent `record`; return the bytes written. See `Tier.write`."""
        layout, rows = self._layout, record.rows
        if len(slots) != layout.blocks(rows):
            raise StoreError(f"extent {record.id[:16]} has {rows} rows but {len(slots)} slots")
        progress()  # the slots of a task that was given up belong to another one
        arena.zero_tail(slots, rows)
        parts = list(pieces.pieces(layout, rows, layout.tensor_bytes(rows), slots, pieces.WRITE_BYTES))
        # With one piece only, the making of the file is all that its checksums can be computed beside.
        first = self._begin_checksums(parts[0], arena, slots) if len(parts) == 1 else None
        temporary = self._folder.temporary(record.id)
        try:
            fd, direct = self._folder.create(record.id, temporary, direct=layout.aligned)
            try:
                try:
                    written = self._write_file(fd, record, arena, slots, parts, first, progress)
                    if not direct:
                        forget_pages(fd)
                finally:
                    os.close(fd)
                progress()
                self._folder.publish(temporary, record.id)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise StoreError(f"writing extent {record.id[:16]}: {error.strerror}") from error
        return written

    def _write_file(
        self,
        fd: int,
        record: ExtentRecord,
        arena: HostArena,
        slots: Sequence[int],
        parts: Sequence[Tensors],
        first: Checksums | None,
        progress: Callable[[], None],
    ) -> int:
        """Write the first piece last, with the head, which holds the checksums of all: those are computed while the others are
        written.
        """
        layout, rows = self._layout, record.rows
        written = 0
        others = []
        for part in parts[1:]:
            others.append(self._begin_checksums(part, arena, slots))
            first = first or self._begin_checksums(parts[0], arena, slots)
            written += write_full(fd, self._sources(part, arena, slots, rows), layout.offset(rows, *part[0]))
            progress()
        assert first is not None
        crcs = np.full((layout.layers * 2, layout.file_chunks(rows)), self._blank_crc, np.uint32)
        crcs[:, : len(slots)] = [tensor for wait in (first, *others) for tensor in wait()]
        sidecar = None
        if layout.probe_heads:
            sidecar, size = self._write_probes(fd, rows, arena, slots, progress)
            written += size
        head = self._heads.take(layout.head_bytes(rows))
        head[:] = np.frombuffer(encode_head(layout, self._digest, record, crcs, sidecar), np.uint8)
        written += write_full(fd, [head, *self._sources(parts[0], arena, slots, rows)], 0)
        progress()
        return written

    def _write_probes(
        self, fd: int, rows: int, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]
    ) -> tuple[Sidecar, int]:
        """Write the first heads' keys of each layer once more, by themselves; rows lie as the text goes."""
        layout, written = self._layout, 0
        padded, chunks, size = layout.padded_rows(rows), layout.file_chunks(rows), layout.probe_bytes(rows)
        crcs = np.empty((layout.layers, chunks), np.uint32)
        for layer in range(layout.layers):
            probes = self._scratch.take(size)
            by_row = probes.reshape(padded, -1)
            used = len(slots) * BLOCK_ROWS
            by_row[:used] = arena.rows[layer, KEYS, list(slots), :, : layout.probe_row_bytes].reshape(used, -1)
            by_row[used:] = 0
            crcs[layer] = [crc32c(chunk) for chunk in probes.reshape(chunks, -1)]
            written += write_full(fd, [probes], layout.offset(rows, layer, PROBES))
            progress()
        return Sidecar(crcs, np.tile(np.arange(padded, dtype=np.uint16), (layout.layers, 1))), written

    def _begin_checksums(self, part: Tensors, arena: HostArena, slots: Sequence[int]) -> Checksums:
        def work() -> list[list[int]]:
            planes = [arena.plane(layer, kv) for layer, kv in part]
            return [[crc32c(plane[slot]) for slot in slots] for plane in planes]

        return self._checksums.submit(work).result

    def _sources(self, part: Tensors, arena: HostArena, slots: Sequence[int], rows: int) -> list[Bytes]:
        """Return the arena's own buffers of a piece, or where these are not aligned a copy, whose padding chunks are blank."""
        if arena.aligned or not self._layout.aligned:  # where tensors are not aligned, nothing is padded either
            return arena_buffers(part, arena, slots)
        span = self._layout.tensor_bytes(rows)
        bounce = self._scratch.take(len(part) * span)
        for tensor, (layer, kv) in zip(bounce.reshape(-1, span), part, strict=True):
            used = len(slots) * self._layout.chunk_bytes
            tensor[:used].reshape(len(slots), -1)[:] = arena.plane(layer, kv)[list(slots)]
            tensor[used:] = 0
        return [bounce]
