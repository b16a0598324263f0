"""The disk tier: one safetensors file per extent, `extents/ab/abcdef….safetensors`. Knows no catalog, no
threads.

A file is written under a temporary name and renamed when it is whole. There is no fsync: a killed process
loses no page cache, and what a power failure tears is caught by the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.extent import Bytes, Head, crc32c, decode_head, encode_head, peek_rows
from afterglow.store.files import (
    IOV_MAX,
    Scratch,
    forget_pages,
    open_direct,
    read_full,
    supports_direct,
    write_full,
)
from afterglow.store.layout import ALIGNMENT, KVLayout, align_up
from afterglow.store.tier import HostArena, runs

SUFFIX: Final = ".safetensors"
TEMPORARY: Final = ".tmp-"
READ_BYTES: Final = 1 << 20  # small layers are read together up to this; more gains nothing and delays layer 0
WRITE_BYTES: Final = 4 << 20

Piece = list[tuple[int, int]]  # (layer, kv) of tensors that lie side by side in the file and move in one call


class DiskTier:
    """Extents as files in one folder. See `Tier` for the methods' promises."""

    def __init__(self, folder: Path, layout: KVLayout, digest: str, *, inspect: bool = False) -> None:
        """Raises StoreError when the folder cannot be used. Temporary files of dead processes are removed.

        `inspect`: only look, beside the process that owns the folder: nothing is made, tried or removed.
        """
        self.folder = folder
        self.layout = layout
        self.digest = digest
        self.direct = False
        self._scratch = Scratch()
        self._heads = Scratch()
        self._numbers = count()
        if inspect:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.direct = supports_direct(folder)
            for leftover in self.leftovers():
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot use {folder}: {error.strerror}") from error

    def path(self, extent: str) -> Path:
        """Where the file of an extent is, or would be."""
        return self.folder / extent[:2] / f"{extent}{SUFFIX}"

    # ------------------------------------------------------------------------------------------- writing

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store the blocks in `slots` as the extent `record`; the rows beyond its last are blanked in the
        arena.
        """
        final = self.path(record.id)
        temporary = final.parent / f"{TEMPORARY}{os.getpid()}-{next(self._numbers)}"
        try:
            final.parent.mkdir(exist_ok=True)
            fd, direct = open_direct(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=self.direct)
            try:
                try:
                    written = self._write_file(fd, record, arena, slots, progress)
                    if not direct:
                        forget_pages(fd)
                finally:
                    os.close(fd)
                progress()
                os.rename(temporary, final)
            except BaseException:
                temporary.unlink(missing_ok=True)
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
        progress: Callable[[], None],
    ) -> int:
        layout, rows = self.layout, record.rows
        if len(slots) != layout.blocks(rows):
            raise StoreError(f"extent {record.id[:16]} has {rows} rows but {len(slots)} slots")
        arena.zero_tail(slots, rows)
        crcs = np.full((layout.layers, 2, layout.file_chunks(rows)), self._blank_crc(), np.uint32)
        for layer in range(layout.layers):
            for kv in (0, 1):
                plane = arena.plane(layer, kv)
                crcs[layer, kv, : len(slots)] = [crc32c(plane[slot]) for slot in slots]
        head = self._heads.take(layout.head_bytes(rows))
        head[:] = np.frombuffer(encode_head(layout, self.digest, record, crcs), np.uint8)
        span = layout.tensor_bytes(rows)
        written, offset = 0, 0
        for piece in self._pieces(rows, span, slots, WRITE_BYTES):
            if arena.aligned:
                buffers = self._direct_buffers(piece, arena, slots)
            else:
                buffers = [self._gather(piece, arena, slots, span)]
            if not written:
                buffers.insert(0, head)
            written += write_full(fd, buffers, offset)
            offset = written
            progress()
        return written

    def _gather(self, piece: Piece, arena: HostArena, slots: Sequence[int], span: int) -> Bytes:
        """The tensors of a piece in the bounce buffer, padding chunks blank: uint8 [tensors * span]."""
        bounce = self._scratch.take(len(piece) * span)
        for tensor, (layer, kv) in zip(bounce.reshape(-1, span), piece, strict=True):
            used = len(slots) * self.layout.chunk_bytes
            tensor[:used].reshape(len(slots), -1)[:] = arena.plane(layer, kv)[list(slots)]
            tensor[used:] = 0
        return bounce

    def _blank_crc(self) -> int:
        return crc32c(bytes(self.layout.chunk_bytes))

    # ------------------------------------------------------------------------------------------- reading

    def read(
        self,
        extent: str,
        rows: int,
        arena: HostArena,
        slots: Sequence[int],
        layer_done: Callable[[int], None],
    ) -> int:
        """Fill `slots` with the first `len(slots)` blocks of the extent, layer by layer, each verified."""
        try:
            fd, direct = open_direct(str(self.path(extent)), os.O_RDONLY, direct=self.direct)
            try:
                size = os.fstat(fd).st_size
                if size != self.layout.file_bytes(rows):
                    raise DamageError(f"{size} bytes long instead of {self.layout.file_bytes(rows)}")
                total = self._read_file(fd, extent, rows, arena, slots, layer_done)
                if not direct:
                    forget_pages(fd)
                return total
            finally:
                os.close(fd)
        except DamageError as error:
            raise DamageError(f"extent {extent[:16]}: {error}") from error
        except OSError as error:
            raise StoreError(f"reading extent {extent[:16]}: {error.strerror}") from error

    def _read_file(
        self,
        fd: int,
        extent: str,
        rows: int,
        arena: HostArena,
        slots: Sequence[int],
        layer_done: Callable[[int], None],
    ) -> int:
        layout = self.layout
        whole = len(slots) == layout.blocks(rows)
        span = layout.tensor_bytes(rows) if whole else align_up(len(slots) * layout.chunk_bytes)
        raw_head = self._heads.take(layout.head_bytes(rows))
        head: Head | None = None
        total = 0
        for piece in self._pieces(rows, span, slots, READ_BYTES):
            bounce = None if arena.aligned else self._scratch.take(len(piece) * span)
            buffers = self._direct_buffers(piece, arena, slots) if bounce is None else [bounce]
            offset = layout.offset(rows, *piece[0])
            if head is None:  # the head ends where layer 0 begins: one read brings both
                buffers, offset = [raw_head, *buffers], 0
            total += read_full(fd, buffers, offset)
            if head is None:
                head = decode_head(raw_head.tobytes(), layout, self.digest, extent=extent, rows=rows)
            for index, (layer, kv) in enumerate(piece):
                plane = arena.plane(layer, kv)
                if bounce is None:
                    chunks = [plane[slot] for slot in slots]
                else:
                    used = bounce[index * span :][: len(slots) * layout.chunk_bytes]
                    chunks = list(used.reshape(len(slots), -1))
                    plane[list(slots)] = used.reshape(len(slots), -1)
                self._compare(chunks, head, layer, kv)
            layer_done(piece[-1][0] + piece[-1][1])  # a piece that ends with keys leaves its layer open
        return total

    def _pieces(self, rows: int, span: int, slots: Sequence[int], limit: int) -> Iterator[Piece]:
        """All tensors in file order, joined where neighbours fit one call of about `limit` bytes.

        A layer's keys and values always go together: one is of no use without the other, and every call costs
        this thread the interpreter lock, which a busy thread gives back only after milliseconds.
        """
        most = 1
        if span == self.layout.tensor_bytes(rows):  # neighbours, without a gap between them
            segments = sum(1 for _ in runs(slots))
            most = max(1, min(limit // span, IOV_MAX // segments) // 2) * 2
        tensors = [(layer, kv) for layer in range(self.layout.layers) for kv in (0, 1)]
        for start in range(0, len(tensors), most):
            yield tensors[start : start + most]

    @staticmethod
    def _direct_buffers(piece: Piece, arena: HostArena, slots: Sequence[int]) -> list[Bytes]:
        """Views of the arena in the order of the file; a run of consecutive slots is one buffer."""
        return [arena.plane(layer, kv)[a:b] for layer, kv in piece for a, b in runs(slots)]

    # --------------------------------------------------------------------------------------- the rest

    def head(self, extent: str) -> Head:
        """The verified head of an extent, whatever its row count."""
        return self.head_of(self.path(extent), extent)

    def head_of(self, path: Path, extent: str | None = None) -> Head:
        """The verified head of the file at `path`; page cache or not does not matter here."""
        try:
            with open(path, "rb", buffering=0) as file:
                start = file.read(ALIGNMENT)
                rows, size = peek_rows(start), os.fstat(file.fileno()).st_size
                if size != self.layout.file_bytes(rows):  # also keeps a wrong count from asking for gigabytes
                    raise DamageError(f"{size} bytes long instead of {self.layout.file_bytes(rows)}")
                head = start + file.read(self.layout.head_bytes(rows) - len(start))
        except DamageError as error:
            raise DamageError(f"{path.name[:16]}: {error}") from error
        except OSError as error:
            raise StoreError(f"reading {path}: {error.strerror}") from error
        return decode_head(head, self.layout, self.digest, extent=extent)

    def verify(self, extent: str) -> Head:
        """Read every byte of an extent and compare it with the checksums; returns its head.

        Errors as for `read`.
        """
        head = self.head(extent)
        layout, rows = self.layout, head.record.rows
        span = layout.tensor_bytes(rows)
        tensor = self._scratch.take(span)
        try:
            with open(self.path(extent), "rb", buffering=0) as file:
                for layer, kv in np.ndindex(layout.layers, 2):
                    read_full(file.fileno(), [tensor], layout.offset(rows, layer, kv))
                    self._compare(list(tensor.reshape(-1, layout.chunk_bytes)), head, layer, kv)
                forget_pages(file.fileno())
        except OSError as error:
            raise StoreError(f"reading extent {extent[:16]}: {error.strerror}") from error
        return head

    @staticmethod
    def _compare(chunks: Sequence[Bytes], head: Head, layer: int, kv: int) -> None:
        for chunk, (data, crc) in enumerate(zip(chunks, head.crcs[layer, kv], strict=False)):
            if crc32c(data) != crc:
                raise DamageError(f"layer {layer}, {('keys', 'values')[kv]}, chunk {chunk}")

    def delete(self, extent: str) -> None:
        """Remove the file of an extent; one that is not there is no error."""
        try:
            self.path(extent).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"removing extent {extent[:16]}: {error.strerror}") from error

    def leftovers(self) -> list[Path]:
        """Files that are no extents, or in a place where nobody looks for them.

        Where no process writes, the temporary ones are what a killed one left behind.
        """
        temporary = self.folder.glob(f"{TEMPORARY}*")
        return sorted([*temporary, *(Path(file.path) for file in self._files() if not _in_place(file))])

    def extents(self) -> Iterator[str]:
        """The ids of all files that look like extents, by name."""
        return (file.name[: -len(SUFFIX)] for file in self._files() if _in_place(file))

    def _files(self) -> Iterator[os.DirEntry[str]]:
        try:
            if not self.folder.exists():
                return
            with os.scandir(self.folder) as folders:
                for folder in folders:
                    if folder.is_dir():
                        with os.scandir(folder) as files:
                            yield from files
        except OSError as error:
            raise StoreError(f"listing {self.folder}: {error.strerror}") from error


def _in_place(file: os.DirEntry[str]) -> bool:
    """Whether a file has an extent's name and lies where that extent is looked for."""
    folder = os.path.basename(os.path.dirname(file.path))
    return file.name.endswith(SUFFIX) and file.name[:2] == folder
