"""The disk tier: one safetensors file per extent, `extents/ab/abcdef….safetensors`. Knows no catalog, no
threads.

A file is written under a temporary name and renamed when it is whole. There is no fsync: a killed process
loses no page cache, and what a power failure tears is caught by the checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from afterglow.config import BLOCK_ROWS
from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.chunks import TENSORS, ChunkRead, ChunkReader, crcs_of, in_text_order
from afterglow.store.extent import Bytes, Head, Sidecar, crc32c, decode_head, encode_head, peek_rows
from afterglow.store.files import (
    IOV_MAX,
    Helper,
    Scratch,
    forget_pages,
    open_direct,
    read_full,
    supports_direct,
    write_full,
)
from afterglow.store.layout import ALIGNMENT, KEYS, PROBES, KVLayout, align_up
from afterglow.store.places import FOLDER_MODE, kind_at, make_folder, open_file, remove
from afterglow.store.rewriting import Files, Ranks, Rewriting
from afterglow.store.tier import HostArena, runs

log = logging.getLogger("afterglow.store")

SUFFIX: Final = ".safetensors"
TEMPORARY: Final = ".tmp-"
READ_BYTES: Final = 4 << 20  # small layers are read together up to this; more gains nothing and delays layer 0
WRITE_BYTES: Final = 4 << 20
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")

Piece = list[tuple[int, int]]  # (layer, kv) of tensors that lie side by side in the file and move in one call
Checksums = Callable[[], list[list[int]]]  # waits for those of a piece: by tensor, by chunk


class DiskTier:
    """Extents as files in one folder. See `Tier` for the methods' promises."""

    def __init__(
        self,
        folder: Path,
        layout: KVLayout,
        digest: str,
        *,
        inspect: bool = False,
        remake: Callable[[], object] | None = None,
    ) -> None:
        """Raises StoreError when the folder cannot be used. Temporary files of dead processes are removed, and whatever else
        is no extent but for folders that are nobody's (`strange`). `remake`: makes what the folder is in, if it is gone.

        `inspect`: only look, beside the process that owns the folder: nothing is made, tried or removed.
        """
        self.folder = folder
        self.layout = layout
        self.digest = digest
        self.direct = False
        self.strange = 0  # what was found at the start that is neither an extent nor a temporary file
        self._remake = remake
        self._scratch = Scratch()
        self._heads = Scratch()
        self._helper = Helper()
        self._blank_crc = crc32c(bytes(layout.chunk_bytes))
        self._numbers = count()
        if inspect:
            return
        try:
            self.strange += make_folder(folder)
            self.direct = supports_direct(folder)
            for leftover in self.leftovers():
                self.strange += not leftover.name.startswith(TEMPORARY)
                if kind_at(leftover) == "folder":
                    log.warning("%s is none of the cache's folders: it is left alone", leftover)
                else:
                    leftover.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot use {folder}: {error.strerror}") from error
        self._chunks = ChunkReader(layout, digest, self.direct)

    def path(self, extent: str) -> Path:
        """Where the file of an extent is, or would be."""
        return self.folder / extent[:2] / f"{extent}{SUFFIX}"

    # ------------------------------------------------------------------------------------------- writing

    def write(self, record: ExtentRecord, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]) -> int:
        """Store the blocks in `slots` as the extent `record`; the rows beyond its last are blanked in the
        arena.
        """
        layout, rows = self.layout, record.rows
        if len(slots) != layout.blocks(rows):
            raise StoreError(f"extent {record.id[:16]} has {rows} rows but {len(slots)} slots")
        progress()  # the slots of a task that was given up are somebody else's
        arena.zero_tail(slots, rows)
        pieces = list(self._pieces(rows, layout.tensor_bytes(rows), slots, WRITE_BYTES))
        # With one piece only, the making of the file is all that its checksums can be computed beside.
        first = self._begin_checksums(pieces[0], arena, slots) if len(pieces) == 1 else None

        def fill(fd: int) -> int:
            return self._write_file(fd, record, arena, slots, pieces, first, progress)

        return self._put(record.id, fill, progress)

    def _put(self, extent: str, fill: Callable[[int], int], progress: Callable[[], None]) -> int:
        """Make the file of an extent, all of it or nothing; returns what `fill` returns, the bytes written."""
        folder = self.folder / extent[:2]
        temporary = self._temporary(str(folder))
        try:
            fd, direct = self._create(folder, temporary)
            try:
                try:
                    written = fill(fd)
                    if not direct:
                        forget_pages(fd)
                finally:
                    os.close(fd)
                progress()
                try:
                    os.rename(temporary, f"{folder}/{extent}{SUFFIX}")
                except IsADirectoryError:
                    self._out_of_the_way(self.path(extent))
                    os.rename(temporary, f"{folder}/{extent}{SUFFIX}")
                self._chunks.forget(extent)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            raise StoreError(f"writing extent {extent[:16]}: {error.strerror}") from error
        return written

    def _create(self, folder: Path, name: str) -> tuple[int, bool]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        if kind_at(self.folder) == "other":
            make_folder(self.folder)
        found = kind_at(folder)
        if found == "folder":
            return open_direct(name, flags, direct=self.direct)
        if found != "absent":
            self._out_of_the_way(folder)
        try:
            folder.mkdir(FOLDER_MODE, exist_ok=True)
        except FileNotFoundError:  # another process has removed it whole
            log.warning("%s was removed: it is made again", self.folder)
            if self._remake is not None:
                self._remake()
            make_folder(self.folder)
            folder.mkdir(FOLDER_MODE, exist_ok=True)
        return open_direct(name, flags, direct=self.direct)

    def _out_of_the_way(self, path: Path) -> None:
        """Something has the name of an extent, or of a folder of extents, and is none. What is in a folder is not ours."""
        log.warning("%s is not what belongs there: it is put out of the way", path)
        if kind_at(path) == "folder":
            os.rename(path, self.folder / f"strange-{os.getpid()}-{next(self._numbers)}-{path.name}")
        else:
            path.unlink(missing_ok=True)

    def _write_file(
        self,
        fd: int,
        record: ExtentRecord,
        arena: HostArena,
        slots: Sequence[int],
        pieces: Sequence[Piece],
        first: Checksums | None,
        progress: Callable[[], None],
    ) -> int:
        """The first piece goes last, with the head, which holds the checksums of all: those are computed while the
        others are written.
        """
        layout, rows = self.layout, record.rows
        span = layout.tensor_bytes(rows)
        written = 0
        others = []
        for piece in pieces[1:]:
            others.append(self._begin_checksums(piece, arena, slots))
            first = first or self._begin_checksums(pieces[0], arena, slots)
            written += write_full(fd, self._sources(piece, arena, slots, span), layout.offset(rows, *piece[0]))
            progress()
        assert first is not None
        crcs = np.full((layout.layers * 2, layout.file_chunks(rows)), self._blank_crc, np.uint32)
        crcs[:, : len(slots)] = [tensor for wait in (first, *others) for tensor in wait()]
        sidecar = None
        if layout.probe_heads:
            sidecar, size = self._write_probes(fd, rows, arena, slots, progress)
            written += size
        head = self._heads.take(layout.head_bytes(rows))
        head[:] = np.frombuffer(encode_head(layout, self.digest, record, crcs, sidecar), np.uint8)
        written += write_full(fd, [head, *self._sources(pieces[0], arena, slots, span)], 0)
        progress()
        return written

    def _write_probes(
        self, fd: int, rows: int, arena: HostArena, slots: Sequence[int], progress: Callable[[], None]
    ) -> tuple[Sidecar, int]:
        """The first heads' keys of each layer once more, by themselves; rows lie as the text goes."""
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
        return Sidecar(crcs, np.tile(np.arange(padded, dtype=np.uint16), (layout.layers, 1))), written

    def rewriting(
        self, extent: str, rows: int, ranks: Ranks, carried: Callable[[int], None] | None = None
    ) -> Rewriting:
        """Begin to put an extent's rows in another order; see `Tier.rewriting`. `carried` is told of the bytes of each
        layer that has been read and written."""
        folder = f"{self.folder}/{extent[:2]}"
        files = Files(f"{folder}/{extent}{SUFFIX}", self._temporary(folder), self.direct)
        return Rewriting(files, self.layout, self.digest, extent, rows, ranks, carried)

    def rewritten(self, extent: str) -> None:
        """A new version has been published."""
        self._chunks.forget(extent)

    def _temporary(self, folder: str) -> str:
        return f"{folder}/{TEMPORARY}{os.getpid()}-{next(self._numbers)}"

    def _begin_checksums(self, piece: Piece, arena: HostArena, slots: Sequence[int]) -> Checksums:
        def work() -> list[list[int]]:
            planes = [arena.plane(layer, kv) for layer, kv in piece]
            return [[crc32c(plane[slot]) for slot in slots] for plane in planes]

        return self._helper.start(work)

    def _sources(self, piece: Piece, arena: HostArena, slots: Sequence[int], span: int) -> list[Bytes]:
        return self._direct_buffers(piece, arena, slots) if arena.aligned else [self._gather(piece, arena, slots, span)]

    def _gather(self, piece: Piece, arena: HostArena, slots: Sequence[int], span: int) -> Bytes:
        """The tensors of a piece in the bounce buffer, padding chunks blank: uint8 [tensors * span]."""
        bounce = self._scratch.take(len(piece) * span)
        for tensor, (layer, kv) in zip(bounce.reshape(-1, span), piece, strict=True):
            used = len(slots) * self.layout.chunk_bytes
            tensor[:used].reshape(len(slots), -1)[:] = arena.plane(layer, kv)[list(slots)]
            tensor[used:] = 0
        return bounce

    # ------------------------------------------------------------------------------------------- reading

    def read(
        self,
        extent: str,
        rows: int,
        arena: HostArena,
        slots: Sequence[int],
        layer_done: Callable[[int], None],
        first: int = 0,
        stop: int | None = None,
        heads: dict[str, Head] | None = None,
    ) -> int:
        """Fill `slots` with layers [first, stop) of the first `len(slots)` blocks, each verified. See `Tier.read`."""
        layers = range(self.layout.layers)[first:stop]
        try:
            self._check_folder(extent)
            fd, direct = open_direct(str(self.path(extent)), os.O_RDONLY, direct=self.direct)
            try:
                size = os.fstat(fd).st_size
                if size != self.layout.file_bytes(rows):
                    raise DamageError(f"{size} bytes long instead of the {self.layout.file_bytes(rows)} of {rows} rows")
                total = self._read_file(
                    fd, extent, rows, arena, slots, layer_done, layers, {} if heads is None else heads
                )
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
        layers: range,
        heads: dict[str, Head],
    ) -> int:
        layout = self.layout
        if layout.probe_heads:
            if extent not in heads:
                raw = self._heads.take(layout.head_bytes(rows))
                read_full(fd, [raw], 0)
                heads[extent] = decode_head(raw.tobytes(), layout, self.digest, extent=extent, rows=rows)
            sidecar = heads[extent].sidecar
            if sidecar is not None and sidecar.reordered:
                return self._read_reordered(fd, rows, arena, slots, layer_done, layers, heads[extent])
        whole = len(slots) == layout.blocks(rows)
        span = layout.tensor_bytes(rows) if whole else align_up(len(slots) * layout.chunk_bytes)
        raw_head = self._heads.take(layout.head_bytes(rows))

        def settle(piece: Piece, bounce: Bytes | None) -> None:
            """Verify the tensors of a piece; bring them to their slots where they have not been read into them."""
            head = heads.get(extent)
            if head is None:
                head = heads[extent] = decode_head(raw_head.tobytes(), layout, self.digest, extent=extent, rows=rows)
            used = len(slots) * layout.chunk_bytes
            for index, (layer, kv) in enumerate(piece):
                plane = arena.plane(layer, kv)
                if bounce is None:
                    self._compare([plane[slot] for slot in slots], head, layer, kv)
                else:
                    tensor = bounce[index * span :][:used].reshape(len(slots), -1)
                    self._compare(list(tensor), head, layer, kv)
                    plane[list(slots)] = tensor

        joined = self._pieces(rows, span, slots, READ_BYTES)
        pieces = [part for piece in joined if (part := [tensor for tensor in piece if tensor[0] in layers])]
        if layers.start and extent not in heads:
            read_full(fd, [raw_head], 0)
        total = done = 0
        settled: Callable[[], None] | None = None  # waits for what is verified while the next piece is read
        for piece in pieces:
            bounce = None if arena.aligned else self._scratch.take(len(piece) * span)
            buffers = self._direct_buffers(piece, arena, slots) if bounce is None else [bounce]
            if piece[0] == (0, 0):  # the head ends where layer 0 begins: one read brings both
                total += read_full(fd, [raw_head, *buffers], 0)
            else:
                total += read_full(fd, buffers, layout.offset(rows, *piece[0]))
            if settled is not None:
                settled()
                layer_done(done)
            done = piece[-1][0] + piece[-1][1]  # a piece that ends with keys leaves its layer open
            if bounce is None and piece is not pieces[-1]:
                settled = self._helper.start(partial(settle, piece, bounce))
            else:
                settle(piece, bounce)
                settled = None
                layer_done(done)
        return total

    def _read_reordered(
        self,
        fd: int,
        rows: int,
        arena: HostArena,
        slots: Sequence[int],
        layer_done: Callable[[int], None],
        layers: range,
        head: Head,
    ) -> int:
        """As `_read_file`: rows whose place in the file is another go where the text has them. Reads whole tensors."""
        layout, total = self.layout, 0 if layers.start else self.layout.head_bytes(rows)
        assert head.sidecar is not None
        wanted = len(slots) * BLOCK_ROWS
        for layer in layers:
            for kv in (0, 1):
                stored = self._scratch.take(layout.tensor_bytes(rows))
                total += read_full(fd, [stored], layout.offset(rows, layer, kv))
                self._compare(list(stored.reshape(-1, layout.chunk_bytes)), head, layer, kv)
                text = in_text_order(stored.reshape(-1, layout.row_bytes), head.sidecar.order[layer])
                arena.rows[layer, kv, list(slots)] = text[:wanted].reshape(len(slots), BLOCK_ROWS, -1)
            layer_done(layer + 1)
        return total

    def read_chunks(self, extent: str, rows: int, reads: Sequence[ChunkRead], edition: str) -> tuple[int, Head]:
        """Carry out `reads` of an extent of `rows` rows; see `Tier.read_chunks`."""
        try:
            self._check_folder(extent)
            return self._chunks.read(str(self.path(extent)), extent, rows, reads, edition)
        except DamageError as error:
            raise DamageError(f"extent {extent[:16]}: {error}") from error
        except OSError as error:
            raise StoreError(f"reading extent {extent[:16]}: {error.strerror}") from error

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
        stretches = list(runs(slots))
        planes = [arena.plane(layer, kv) for layer, kv in piece]
        return [plane[a:b] for plane in planes for a, b in stretches]

    # --------------------------------------------------------------------------------------- the rest

    def _check_folder(self, extent: str) -> None:
        """Raises DamageError where the folder of an extent is a link, or anything else that is no folder."""
        folder = self.folder / extent[:2]
        if kind_at(folder) == "other" or kind_at(self.folder) == "other":
            raise DamageError(f"{folder} is no folder")

    def head(self, extent: str) -> Head:
        """The verified head of an extent, whatever its row count."""
        return self.head_of(self.path(extent), extent)

    def head_of(self, path: Path, extent: str | None = None) -> Head:
        """The verified head of the file at `path`; page cache or not does not matter here."""
        try:
            self._check_folder(path.parent.name)
            with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
                start = file.read(ALIGNMENT)
                rows, size = peek_rows(start), os.fstat(file.fileno()).st_size
                if size != self.layout.file_bytes(rows):  # also keeps a wrong count from asking for gigabytes
                    raise DamageError(f"{size} bytes long instead of the {self.layout.file_bytes(rows)} of {rows} rows")
                head = start + file.read(self.layout.head_bytes(rows) - len(start))
        except DamageError as error:
            raise DamageError(f"{path.name[:16]}: {error}") from error
        except OSError as error:
            raise StoreError(f"reading {path}: {error.strerror}") from error
        return decode_head(head, self.layout, self.digest, extent=extent)

    def verify(self, extent: str, seen: Callable[[int, int, Bytes], None] | None = None) -> Head:
        """Read every byte of an extent and compare it with the checksums; returns its head.

        `seen(layer, kv, tensor)` may look at the keys and values, as they are stored. Errors as for `read`.
        """
        head = self.head(extent)
        layout, rows = self.layout, head.record.rows
        span = layout.tensor_bytes(rows)
        tensor = self._scratch.take(span)
        try:
            with open(open_file(self.path(extent), os.O_RDONLY), "rb", buffering=0) as file:
                for layer, kv in np.ndindex(layout.layers, 2):
                    read_full(file.fileno(), [tensor], layout.offset(rows, layer, kv))
                    self._compare(list(tensor.reshape(-1, layout.chunk_bytes)), head, layer, kv)
                    if seen is not None:
                        seen(layer, kv, tensor)
                for layer in range(layout.layers if layout.probe_heads else 0):
                    probes = tensor[: layout.probe_bytes(rows)]
                    read_full(file.fileno(), [probes], layout.offset(rows, layer, PROBES))
                    self._compare(list(probes.reshape(-1, layout.probe_chunk_bytes)), head, layer, PROBES)
                forget_pages(file.fileno())
        except OSError as error:
            raise StoreError(f"reading extent {extent[:16]}: {error.strerror}") from error
        return head

    @staticmethod
    def _compare(chunks: Sequence[Bytes], head: Head, layer: int, kv: int) -> None:
        found, wanted = [crc32c(data) for data in chunks], crcs_of(head, layer, kv)[: len(chunks)]
        if found != wanted:
            chunk = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise DamageError(f"layer {layer}, {TENSORS[kv]}, chunk {chunk}")

    def delete(self, extent: str) -> None:
        """Remove the file of an extent; one that is not there is no error."""
        path = self.path(extent)
        try:
            found = kind_at(path.parent) if kind_at(self.folder) == "folder" else "absent"
            if found == "folder" and kind_at(path) == "folder":
                self._out_of_the_way(path)
            elif found == "folder":
                path.unlink(missing_ok=True)
            self._chunks.forget(extent)
        except OSError as error:
            raise StoreError(f"removing extent {extent[:16]}: {error.strerror}") from error

    def leftovers(self) -> list[Path]:
        """What is no extent, or in a place where nobody looks for it: files, links, folders.

        Where no process writes, the temporary ones are what a killed one left behind.
        """
        beside = [Path(entry.path) for entry in self._entries(self.folder) if not _is_ours(entry)]
        return sorted([*beside, *(Path(file.path) for file in self._files() if not _in_place(file))])

    def clean(self) -> None:
        """Remove all leftovers, folders too. Raises StoreError."""
        try:
            for leftover in self.leftovers():
                remove(leftover)
        except OSError as error:
            raise StoreError(f"cannot clean {self.folder}: {error.strerror}") from error

    def extents(self) -> Iterator[str]:
        """The ids of all files that look like extents, by name."""
        return (file.name[: -len(SUFFIX)] for file in self._files() if _in_place(file))

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for folder in self._entries(self.folder):
            if _is_ours(folder):
                yield from self._entries(folder.path)

    def _entries(self, folder: str | Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries) if kind_at(folder) == "folder" else []
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"listing {folder}: {error.strerror}") from error


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Is it a folder for extents?"""
    return _FOLDER.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _in_place(file: os.DirEntry[str]) -> bool:
    """Whether a file has an extent's name and lies where that extent is looked for."""
    folder = os.path.basename(os.path.dirname(file.path))
    return file.name.endswith(SUFFIX) and file.name[:2] == folder and file.is_file(follow_symlinks=False)
