"""Reads extents: one file each to host slots, every chunk verified."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Final

import numpy as np

from afterglow.config import BLOCK_ROWS
from afterglow.errors import DamageError, StoreError
from afterglow.store.extents import pieces
from afterglow.store.extents.chunks import TENSORS, crcs_of
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.files import Scratch, check_size, forget_pages, naming, read_full, read_span
from afterglow.store.extents.head import Bytes, Head, crc32c, decode_head, peek_rows
from afterglow.store.extents.layout import ALIGNMENT, MEANS, PROBES, KVLayout, align_up
from afterglow.store.extents.pieces import Tensors, arena_buffers, kernels, open_extent, open_sized, read_summed
from afterglow.store.extents.tier import ExtentRead, runs
from afterglow.store.places import open_file

HEADS: Final = 256  # that are kept, of a few KB each
PLANS: Final = 256  # ways to cut a read into calls


class ExtentReader:
    """Reads extents of one layout from one folder."""

    def __init__(self, folder: ExtentFolder, layout: KVLayout, digest: str, checksums: Executor) -> None:
        """`checksums`: computes them while this thread sits in system calls."""
        self._folder = folder
        self._layout = layout
        self._digest = digest
        self._checksums = checksums
        self._scratch = Scratch()
        self._heads = Scratch()
        self._known = lru_cache(HEADS)(_unknown)
        self._parts = lru_cache(PLANS)(self._cut)

    def read(self, read: ExtentRead, layer_done: Callable[[int], None], layers: range) -> int:
        """Fill slots with consecutive layers of an extent's first blocks; return the bytes read. See `Tier.read`."""
        with naming(read.extent, "reading"):
            fd, direct = self._open(read)
            try:
                total = self._read_file(fd, read, layer_done, layers)
                if not direct:
                    forget_pages(fd)
                return total
            finally:
                os.close(fd)

    def _open(self, read: ExtentRead) -> tuple[int, bool]:
        """Open the file of an extent; return its descriptor, and whether it bypasses the page cache."""
        if read.file is None:
            return open_extent(self._folder, self._layout, read.extent, read.rows)
        self._folder.check(read.extent)
        return open_sized(read.file, self._layout, read.rows, direct=False)

    def head(self, path: Path, extent: str | None = None) -> Head:
        """Read and verify the head of the file at `path`, through the page cache or not.

        Raises:
            DamageError: it is no head, or that of another extent.
            StoreError: it cannot be read.
        """
        try:
            self._folder.check(path.parent.name)
            with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
                return self._head_of(file, path.name, extent)
        except OSError as error:
            raise StoreError(f"reading {path}: {error.strerror}") from error

    def _head_of(self, file: FileIO, name: str, extent: str | None) -> Head:
        """Read and verify the head of an open file. Raises: DamageError, OSError."""
        try:
            start = file.read(ALIGNMENT)
            rows = peek_rows(start)
            check_size(file.fileno(), self._layout, rows)  # also keeps a wrong count from asking for gigabytes
            size = self._layout.head_bytes(rows)
            head = (start + file.read(max(0, size - len(start))))[:size]
            return decode_head(head, self._layout, self._digest, extent=extent)
        except DamageError as error:
            raise DamageError(f"{name[:16]}: {error}") from error

    def verify(self, extent: str, seen: Callable[[int, int, Bytes], None] | None = None) -> Head:
        """Read every byte of an extent and compare it with the checksums; return its head.

        `seen(layer, kv, tensor)` may look at the keys and values, as they are stored.

        Raises:
            DamageError, StoreError: as for `read`.
        """
        path, layout = self._folder.file(extent), self._layout
        try:
            self._folder.check(path.parent.name)
            # Head and tensors of one open file: another process may put a new file in its place meanwhile.
            with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
                head = self._head_of(file, path.name, extent)
                rows = head.record.rows
                tensor = self._scratch.take(layout.tensor_bytes(rows))
                for layer, kv in np.ndindex(layout.layers, 2):
                    read_full(file.fileno(), [tensor], layout.offset(rows, layer, kv))
                    _compare(list(tensor.reshape(-1, layout.chunk_bytes)), head, layer, kv)
                    if seen is not None:
                        seen(layer, kv, tensor)
                for layer in range(layout.layers if layout.probe_heads else 0):
                    probes = tensor[: layout.probe_bytes(rows)]
                    read_full(file.fileno(), [probes], layout.offset(rows, layer, PROBES))
                    _compare(list(probes.reshape(-1, layout.probe_chunk_bytes)), head, layer, PROBES)
                for layer in range(layout.layers if layout.means else 0):
                    means = self._scratch.take(layout.mean_bytes(rows))
                    read_full(file.fileno(), [means], layout.offset(rows, layer, MEANS))
                    _compare([means], head, layer, MEANS)
                forget_pages(file.fileno())
        except OSError as error:
            raise StoreError(f"reading extent {extent[:16]}: {error.strerror}") from error
        return head

    def _decode(self, raw: Bytes, read: ExtentRead) -> Head:
        """Return the head that these bytes are. What is not, to the last byte, the head that was verified before is verified."""
        known, found = self._known(read.extent, read.rows), raw.tobytes()
        for stored, head in known:  # at most one
            if stored == found:
                return head
        head = decode_head(found, self._layout, self._digest, extent=read.extent, rows=read.rows)
        known[:] = [(found, head)]
        return head

    def _cut(self, rows: int, blocks: int, segments: int, limit: int, layers: range) -> tuple[int, list[Tensors]]:
        """Choose the tensors of each call that reads some layers; return the bytes of a tensor that are read, and those."""
        layout, used = self._layout, blocks * self._layout.chunk_bytes
        whole = layout.tensor_bytes(rows) if blocks == layout.blocks(rows) else 0
        span = whole or (align_up(used) if layout.aligned else used)
        joined = pieces.pieces(layout, rows, span, segments, limit)
        return span, [part for piece in joined if (part := [tensor for tensor in piece if tensor[0] in layers])]

    def _read_file(self, fd: int, read: ExtentRead, layer_done: Callable[[int], None], layers: range) -> int:
        layout, rows, slots = self._layout, read.rows, read.slots
        if layout.probe_heads:
            if read.head is None:
                read.head = self._decode(read_span(fd, 0, layout.head_bytes(rows), self._heads), read)
            sidecar = read.head.sidecar
            if sidecar is not None and sidecar.reordered:
                return self._read_reordered(fd, read, read.head, layer_done, layers)
        summed = read.arena.whole and kernels() is not None
        limit = pieces.SUMMED_READ_BYTES if summed else pieces.READ_BYTES
        segments = 1 if summed else sum(1 for _ in runs(slots))  # the kernels' calls have memory of their own
        span, parts = self._parts(rows, len(slots), segments, limit, layers)
        raw_head = self._heads.take(layout.head_bytes(rows))
        if (layers.start or read.skip) and read.head is None:
            raw_head = read_span(fd, 0, layout.head_bytes(rows), self._heads)
        total = done = 0
        if read.skip:  # then no read brings the head along, and perhaps none follows
            read.head = read.head or self._decode(raw_head, read)
            total = 0 if layers.start else layout.head_bytes(rows)
            parts = pieces.cut(parts, read)
        if summed:
            return total + self._read_summed(fd, read, parts, raw_head, layer_done, layers)
        settled: Callable[[], None] | None = None  # waits for the piece that is verified while the next one is read
        for part in parts:
            size, bounce = self._fetch(fd, read, part, span, raw_head)
            total += size
            if settled is not None:
                settled()
                layer_done(done)
            done = part[-1][0] + part[-1][1]  # a piece that ends with keys leaves its layer open
            if bounce is None and part is not parts[-1]:
                settled = self._checksums.submit(self._settle, read, part, raw_head, None).result
            else:
                self._settle(read, part, raw_head, bounce)
                settled = None
                layer_done(done)
        if done < layers.stop:  # the last layers leave out all
            layer_done(layers.stop)
        return total

    def _read_summed(
        self,
        fd: int,
        read: ExtentRead,
        parts: list[Tensors],
        raw_head: Bytes,
        layer_done: Callable[[int], None],
        layers: range,
    ) -> int:
        """Read and verify all pieces by one call each; return the bytes."""
        library = kernels()
        assert library is not None
        total = done = 0
        for part in parts:
            (layer, kv), skipped = part[0], read.skipped(part[0][0])
            slots, first = read.slots[skipped:], 2 * layer + kv
            head = raw_head if first == 0 and not read.skip else None
            offset = 0 if head is not None else self._layout.offset(read.rows, layer, kv, skipped)
            moved, sums = read_summed(fd, library, read.arena, range(first, first + len(part)), slots, head, offset)
            total += moved
            if read.head is None:
                read.head = self._decode(raw_head, read)
            _compare_sums(sums, read.head, part, skipped)
            done = part[-1][0] + part[-1][1]  # a piece that ends with keys leaves its layer open
            layer_done(done)
        if done < layers.stop:  # the last layers leave out all
            layer_done(layers.stop)
        return total

    def _fetch(self, fd: int, read: ExtentRead, part: Tensors, span: int, raw_head: Bytes) -> tuple[int, Bytes | None]:
        """Read the tensors of a piece, and the head where it ends before them: one read brings both. Returns the bytes, and the
        buffer that the tensors have come to, `span` bytes each; None if they are in their slots.
        """
        layout, arena, skipped = self._layout, read.arena, read.skipped(part[0][0])
        start = layout.offset(read.rows, *part[0]) + skipped * layout.chunk_bytes
        span -= skipped * layout.chunk_bytes
        begin = 0 if part[0] == (0, 0) and not read.skip else start
        if not layout.aligned or start % ALIGNMENT:
            data = read_span(fd, begin, start - begin + len(part) * span, self._scratch)
            raw_head[: start - begin] = data[: start - begin]
            return data.nbytes, data[start - begin :]
        bounce = None if arena.aligned else self._scratch.take(len(part) * span)
        buffers = arena_buffers(part, arena, read.slots[skipped:]) if bounce is None else [bounce]
        return read_full(fd, buffers if begin else [raw_head, *buffers], begin), bounce

    def _settle(self, read: ExtentRead, part: Tensors, raw_head: Bytes, bounce: Bytes | None) -> None:
        """Verify the tensors of a piece; bring them from the bounce buffer to their slots if they have come there."""
        if read.head is None:
            read.head = self._decode(raw_head, read)
        skipped = read.skipped(part[0][0])
        slots = list(read.slots)[skipped:]
        used = len(slots) * self._layout.chunk_bytes
        for index, (layer, kv) in enumerate(part):
            plane = read.arena.plane(layer, kv)
            if bounce is None:
                _compare([plane[slot] for slot in slots], read.head, layer, kv, skipped)
            else:
                tensor = bounce.reshape(len(part), -1)[index, :used].reshape(len(slots), -1)
                _compare(list(tensor), read.head, layer, kv, skipped)
                plane[slots] = tensor

    def _read_reordered(
        self, fd: int, read: ExtentRead, head: Head, layer_done: Callable[[int], None], layers: range
    ) -> int:
        """As `_read_file`: rows whose place in the file is another go where the text has them. Reads whole tensors."""
        layout, rows, slots = self._layout, read.rows, np.asarray(read.slots)
        total = 0 if layers.start else layout.head_bytes(rows)
        assert head.sidecar is not None
        for layer in layers:
            order = head.sidecar.order[layer]
            wanted = order < len(slots) * BLOCK_ROWS
            places = slots[order[wanted] // BLOCK_ROWS] * BLOCK_ROWS + order[wanted] % BLOCK_ROWS
            for kv in (0, 1):
                stored = read_span(fd, layout.offset(rows, layer, kv), layout.tensor_bytes(rows), self._scratch)
                total += stored.nbytes
                _compare(list(stored.reshape(-1, layout.chunk_bytes)), head, layer, kv)
                text = read.arena.rows[layer, kv].reshape(-1, layout.row_bytes)  # a view: copied once
                found = stored.reshape(-1, layout.row_bytes)
                text[places] = found if len(places) == len(found) else found[wanted]
            layer_done(layer + 1)
        return total


def _unknown(extent: str, rows: int) -> list[tuple[bytes, Head]]:
    """Return a place for the head of an extent and its bytes."""
    return []


def _compare(chunks: Sequence[Bytes], head: Head, layer: int, kv: int, first: int = 0) -> None:
    """Compare chunks from the `first` one of a tensor on with their checksums. Raises: DamageError."""
    found, wanted = [crc32c(data) for data in chunks], crcs_of(head, layer, kv)[first : first + len(chunks)]
    if found != wanted:
        chunk = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True), first) if a != b)
        raise DamageError(f"layer {layer}, {TENSORS[kv]}, chunk {chunk}")


def _compare_sums(sums: array[int], head: Head, part: Tensors, first: int) -> None:
    """Compare the checksums of the chunks from the `first` one on of each tensor with those of the head. Raises: DamageError."""
    blocks = len(sums) // len(part)
    start = 2 * part[0][0] + part[0][1]
    if blocks == head.crcs.shape[-1]:  # nearly always: then they lie side by side
        wanted = head.crcs.data.cast("B")[4 * start * blocks :][: 4 * len(sums)].tobytes()
    else:
        tables = head.crcs.reshape(-1, head.crcs.shape[-1])
        wanted = tables[start : start + len(part), first : first + blocks].tobytes()
    if sums.tobytes() != wanted:
        wrong = next(n for n, (a, b) in enumerate(zip(sums, array("I", wanted), strict=True)) if a != b)
        layer, kv = part[wrong // blocks]
        raise DamageError(f"layer {layer}, {TENSORS[kv]}, chunk {first + wrong % blocks}")
