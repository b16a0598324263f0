"""The disk tier: one safetensors file per extent. Knows no catalog, and no threads but the one for checksums."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from afterglow.config import BLOCK_ROWS
from afterglow.errors import StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.extents import pieces
from afterglow.store.extents.chunk_reader import ChunkReader
from afterglow.store.extents.chunks import ExtentChunks, States
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.extent_reader import ExtentReader
from afterglow.store.extents.files import Scratch, forget_pages, write_full
from afterglow.store.extents.head import Bytes, Head, Sidecar, crc32c, encode_head
from afterglow.store.extents.layout import KEYS, MEANS, PROBES, VALUES, KVLayout
from afterglow.store.extents.means import chunk_means
from afterglow.store.extents.pieces import Tensors, arena_buffers
from afterglow.store.extents.rewriting import Ranks, Rewriting
from afterglow.store.extents.tier import ExtentRead, HostArena, runs

Checksums = Callable[[], list[list[int]]]  # waits for those of some tensors: by tensor, by chunk


class DiskTier:
    """Extents as files in one folder. See `Tier` for the methods' promises."""

    def __init__(
        self,
        path: Path,
        layout: KVLayout,
        digest: str,
        *,
        inspect: bool = False,
        remake: Callable[[], object] | None = None,
    ) -> None:
        """Open the folder. Temporary files of dead processes are removed, and all else that is no extent but for unknown folders
        (`strange`). `remake`: makes the folder around this one, if it is gone.

        `inspect`: only look, beside the process that owns the folder: nothing is made, tried or removed.

        Raises:
            StoreError: the folder cannot be used.
        """
        self.layout = layout
        self.digest = digest
        self.folder = ExtentFolder(path, remake)
        self.strange = 0 if inspect else self.folder.open()  # files and folders that do not belong there
        # Computes checksums while the thread that reads or writes sits in system calls.
        self._checksums = ThreadPoolExecutor(1, "afterglow-checksums")
        self._reader = ExtentReader(self.folder, layout, digest, self._checksums)
        self._chunks = ChunkReader(self.folder, layout, digest)
        self._scratch = Scratch()
        self._heads = Scratch()
        self._blank_crc = crc32c(bytes(layout.chunk_bytes))

    def close(self) -> None:
        """End the thread for checksums; nothing can be written any more."""
        self._checksums.shutdown(wait=False)

    @property
    def direct(self) -> bool:
        """Whether files bypass the page cache."""
        return self.folder.direct

    def path(self, extent: str) -> Path:
        """Name the file of an extent, whether it is there or not."""
        return self.folder.file(extent)

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store the blocks in `slots` as the extent `record`; blank the rows beyond its last in the arena.

        The file is written under a temporary name and renamed when it is complete. There is no fsync: a killed process loses no
        page cache, and the checksums catch what a power failure tears.
        """
        layout, rows = self.layout, record.rows
        if len(slots) != layout.blocks(rows):
            raise StoreError(f"extent {record.id[:16]} has {rows} rows but {len(slots)} slots")
        progress()  # the slots of a task that was given up belong to another one
        arena.zero_tail(slots, rows)
        segments = sum(1 for _ in runs(slots))
        parts = list(pieces.pieces(layout, rows, layout.tensor_bytes(rows), segments, pieces.WRITE_BYTES))
        # With one piece only, the making of the file is all that its checksums can be computed beside.
        first = self._begin_checksums(parts[0], arena, slots) if len(parts) == 1 else None
        temporary = self.folder.temporary(record.id)
        try:
            fd, direct = self.folder.create(record.id, temporary, direct=layout.aligned)
            try:
                try:
                    written = self._write_file(fd, record, arena, slots, parts, first, progress)
                    if not direct:
                        forget_pages(fd)
                finally:
                    os.close(fd)
                progress()
                self.folder.publish(temporary, record.id)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise StoreError(f"writing extent {record.id[:16]}: {error.strerror}") from error
        self._chunks.forget(record.id)
        return written

    def read(self, read: ExtentRead, layer_done: Callable[[int], None], first: int = 0, stop: int | None = None) -> int:
        """Fill slots with layers [first, stop) of an extent's first blocks, each verified."""
        return self._reader.read(read, layer_done, range(self.layout.layers)[first:stop])

    def read_chunks(self, asked: Sequence[ExtentChunks], states: States | None = None) -> tuple[int, list[Head]]:
        """Carry out all reads of some extents."""
        return self._chunks.read(asked, states)

    def rewriting(
        self, extent: str, rows: int, ranks: Ranks, carried: Callable[[int], None] | None = None
    ) -> Rewriting:
        """Begin to put an extent's rows in another order. `carried` is told of the bytes of each layer that has been read and
        written.
        """
        return Rewriting(self.folder, self.layout, self.digest, extent, rows, ranks, carried)

    def rewritten(self, extent: str) -> None:
        """Forget the head of a file that has been replaced by a new version."""
        self._chunks.forget(extent)

    def head(self, extent: str) -> Head:
        """Read the verified head of an extent, whatever its row count."""
        return self._reader.head(self.path(extent), extent)

    def head_of(self, path: Path) -> Head:
        """Read the verified head of the file at `path`."""
        return self._reader.head(path)

    def verify(self, extent: str, seen: Callable[[int, int, Bytes], None] | None = None) -> Head:
        """Read every byte of an extent and compare it with the checksums; return its head. See `ExtentReader.verify`."""
        return self._reader.verify(extent, seen)

    def delete(self, extent: str) -> None:
        """Remove an extent; an extent that is not there is no error."""
        self.folder.delete(extent)
        self._chunks.forget(extent)

    def extents(self) -> Iterator[str]:
        """Yield the ids of all files that look like extents, by name."""
        return self.folder.extents()

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
        layout, rows = self.layout, record.rows
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
            sidecar, size = self._write_sidecar(fd, rows, arena, slots, progress)
            written += size
        head = self._heads.take(layout.head_bytes(rows))
        head[:] = np.frombuffer(encode_head(layout, self.digest, record, crcs, sidecar), np.uint8)
        written += write_full(fd, [head, *self._sources(parts[0], arena, slots, rows)], 0)
        progress()
        return written

    def _write_sidecar(
        self, fd: int, rows: int, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]
    ) -> tuple[Sidecar, int]:
        """Write the first heads' keys of each layer once more, by themselves, and means; rows lie as the text goes."""
        layout, written = self.layout, 0
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
        means = None
        if layout.means:
            means = np.empty(layout.layers, np.uint32)
            for layer in range(layout.layers):
                found = self._scratch.take(layout.mean_bytes(rows))
                found[:] = chunk_means(layout, rows, *(arena.rows[layer, kv, list(slots)] for kv in (KEYS, VALUES)))
                means[layer] = crc32c(found)
                written += write_full(fd, [found], layout.offset(rows, layer, MEANS))
                progress()
        order = np.tile(np.arange(padded, dtype=np.uint16), (layout.layers, 1))
        return Sidecar(crcs, order, parts=self._part_checksums(rows, arena, slots), means=means), written

    def _part_checksums(self, rows: int, arena: HostArena, slots: Sequence[int]) -> npt.NDArray[np.uint32] | None:
        layout = self.layout
        if layout.part_rows == BLOCK_ROWS:
            return None
        blank, parts = crc32c(bytes(layout.part_bytes)), BLOCK_ROWS // layout.part_rows * len(slots)
        crcs = np.full((layout.layers, 2, layout.file_parts(rows)), blank, np.uint32)
        for layer in range(layout.layers):
            for kv in (KEYS, VALUES):
                rows_of = arena.plane(layer, kv)[list(slots)].reshape(-1, layout.part_bytes)
                crcs[layer, kv, :parts] = [crc32c(part) for part in rows_of]
        return crcs

    def _begin_checksums(self, part: Tensors, arena: HostArena, slots: Sequence[int]) -> Checksums:
        def work() -> list[list[int]]:
            if (library := pieces.kernels()) is None:
                planes = [arena.plane(layer, kv) for layer, kv in part]
                return [[crc32c(plane[slot]) for slot in slots] for plane in planes]
            first = 2 * part[0][0] + part[0][1]
            sums, count = pieces.sums_of(library, arena, range(first, first + len(part)), slots), len(slots)
            return [sums[at : at + count].tolist() for at in range(0, len(sums), count)]

        return self._checksums.submit(work).result

    def _sources(self, part: Tensors, arena: HostArena, slots: Sequence[int], rows: int) -> list[Bytes]:
        """Return the arena's own buffers of a piece, or where these are not aligned a copy, whose padding chunks are blank."""
        if arena.aligned or not self.layout.aligned:  # where tensors are not aligned, nothing is padded either
            return arena_buffers(part, arena, slots)
        span = self.layout.tensor_bytes(rows)
        bounce = self._scratch.take(len(part) * span)
        for tensor, (layer, kv) in zip(bounce.reshape(-1, span), part, strict=True):
            used = len(slots) * self.layout.chunk_bytes
            tensor[:used].reshape(len(slots), -1)[:] = arena.plane(layer, kv)[list(slots)]
            tensor[used:] = 0
        return [bounce]
