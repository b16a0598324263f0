"""Reads parts of extents' files: all that is asked of some extents at a time, every part verified.

Where all of it lies is found out first (`_PartRun`). Then one call of the compiled kernels carries all reads out without the interpreter lock
(`pieces.preadv_parts`), or, without these, Python one after another.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

from afterglow.errors import DamageError
from afterglow.store.extents import pieces
from afterglow.store.extents.chunks import BEGUN, LEFT_OUT, TAKEN_BACK, TENSORS, ChunkRead, ExtentChunks, Stale, States
from afterglow.store.extents.extent_folder import ExtentFolder
from afterglow.store.extents.files import Scratch, forget_pages, naming, read_full, read_span, span_bytes
from afterglow.store.extents.head import Bytes, Head, crc32c, decode_head
from afterglow.store.extents.layout import ALIGNMENT, KEYS, MEANS, PROBES, VALUES, KVLayout
from afterglow.store.extents.pieces import kernels

HEADS_KEPT: Final = 1024  # verified heads in memory: about 30 KiB each for 12 layers and 1,024 rows
FILES_AT_ONCE: Final = 64  # that are open

Identity = tuple[int, int, int]  # of a file's version: inode, time of its last change, size


class _Known(NamedTuple):
    """Holds a verified head, the file that has it, and the checksums of all parts as bytes, where `_PartTables.sums` says."""

    identity: Identity
    head: Head
    sums: bytes


class _PartTables(NamedTuple):
    """Tells by the number of a tensor the bytes of a part (`sizes`), and by layer and tensor where its first part lies in a file (`starts`),
    and which of the head's checksums is that part's (`sums`)."""

    sizes: list[int]
    starts: list[list[int]]
    sums: list[list[int]]


class _PartRun(NamedTuple):
    """Holds where the bytes of a read lie: `parts` parts of `size` bytes from `offset` on in an open file, with these checksums
    (`wanted`, 4 bytes each)."""

    read: ChunkRead
    extent: str
    fd: int
    offset: int
    size: int
    parts: int
    wanted: bytes

    @property
    def stop(self) -> int:
        """Say where in the file the bytes end."""
        return self.offset + self.size * self.parts


class ChunkReader:
    """Reads parts of the extents of one folder. Thread-safe."""

    def __init__(self, folder: ExtentFolder, layout: KVLayout, digest: str) -> None:
        self._folder = folder
        self._layout = layout
        self._digest = digest
        self._scratch = Scratch()
        self._heads: OrderedDict[str, _Known] = OrderedDict()

    def read(self, asked: Sequence[ExtentChunks], states: States | None = None) -> tuple[int, list[Head]]:
        """Carry out all reads of some extents, each verified; return the bytes that come from the files, whole pages, and the heads.

        `states`: of all reads, in order (`chunks.WANTED`).
        Raises:
            Stale: a file is of another edition.
            DamageError: a byte is wrong.
            StoreError: a file cannot be read.
        """
        states = bytearray(sum(len(each.reads) for each in asked)) if states is None else states
        total, heads, first = 0, [], 0
        for at in range(0, len(asked), FILES_AT_ONCE):
            some = asked[at : at + FILES_AT_ONCE]
            stop = first + sum(len(each.reads) for each in some)
            moved, found = self._read(some, memoryview(states)[first:stop])
            total, first = total + moved, stop
            heads += found
        return total, heads

    def forget(self, extent: str) -> None:
        """Forget the head of an extent whose file is gone, or another one."""
        self._heads.pop(extent, None)

    def _read(self, asked: Sequence[ExtentChunks], states: memoryview) -> tuple[int, list[Head]]:
        total, known = 0, []
        with self._opened(asked) as files:
            for each, fd in zip(asked, files, strict=True):
                with naming(each.extent, "reading"):
                    moved, found = self._head(fd, each)
                total += moved
                known.append(found)
                if each.reads and found.head.edition != each.edition:
                    raise Stale(
                        f"extent {each.extent[:16]} is of edition {found.head.edition}, not {each.edition}", total
                    )
            if len(states):
                runs = [run for each in zip(asked, files, known, strict=True) for run in _runs(self._layout, *each)]
                with naming(asked[0].extent if len(asked) == 1 else f"one of {len(asked)}", "reading"):
                    sums = self._carry_out(runs, states)
                _verify(runs, states, sums)
                come = (run for run, state in zip(runs, states, strict=True) if state != LEFT_OUT)
                total += sum(span_bytes(run.offset, run.stop - run.offset) for run in come)
        return total, [each.head for each in known]

    @contextmanager
    def _opened(self, asked: Sequence[ExtentChunks]) -> Iterator[list[int]]:
        """Open the files of extents; those that do not bypass the page cache leave nothing there."""
        files: list[int] = []
        cached: list[int] = []
        try:
            for each in asked:
                with naming(each.extent, "reading"):
                    fd, direct = pieces.open_extent(self._folder, self._layout, each.extent, each.rows)
                files.append(fd)
                if not direct:
                    cached.append(fd)
            yield files
            for fd in cached:
                forget_pages(fd)
        finally:
            for fd in files:
                os.close(fd)

    def _head(self, fd: int, of: ExtentChunks) -> tuple[int, _Known]:
        """Return the bytes that were read to learn a file's head, and the head."""
        status = os.fstat(fd)
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._heads.get(of.extent)
        if known is not None and known.identity == identity:
            return 0, known
        raw = read_span(fd, 0, self._layout.head_bytes(of.rows), self._scratch)
        head = decode_head(raw.tobytes(), self._layout, self._digest, extent=of.extent, rows=of.rows)
        head = replace(head, edition=blake2b(raw.data, digest_size=8).hexdigest())
        known = self._heads[of.extent] = _Known(identity, head, _sums_of(head))
        if len(self._heads) > HEADS_KEPT:
            self._heads.popitem(last=False)
        return span_bytes(0, raw.nbytes), known

    def _carry_out(self, runs: Sequence[_PartRun], states: States) -> array[int]:
        """Fill the buffers of all reads but those that were taken back; return the checksum of each part, 0 of those."""
        sums = array("I", bytes(4 * sum(run.parts for run in runs)))
        library = kernels()
        if library is None:
            self._read_one_by_one(runs, states, sums)
            return sums
        places = array("q", [at for run in runs for into in run.read.into for at in _places(into, run.size)])
        readings, place, its_sum = array("q"), places.buffer_info()[0], sums.buffer_info()[0]
        for run in runs:  # no head, and one plane, at address 0
            readings.extend((run.fd, run.offset, 0, 0, 0, 0, 1, place, run.parts, run.size, its_sum))
            place, its_sum = place + places.itemsize * run.parts, its_sum + sums.itemsize * run.parts
        pieces.preadv_parts(library, readings, states)
        return sums

    def _read_one_by_one(self, runs: Sequence[_PartRun], states: States, sums: array[int]) -> None:
        part = 0
        for at, run in enumerate(runs):
            if states[at] in (TAKEN_BACK, LEFT_OUT):
                states[at] = LEFT_OUT
                part += run.parts
                continue
            states[at] = BEGUN
            self._fill(run.fd, run.offset, run.read.into)
            for into in run.read.into:
                for start in range(0, into.nbytes, run.size):
                    sums[part] = crc32c(into[start : start + run.size])
                    part += 1

    def _fill(self, fd: int, start: int, buffers: Sequence[Bytes]) -> None:
        if start % ALIGNMENT == 0 and all(map(_aligned, buffers)):
            read_full(fd, buffers, start)
            return
        from_here = read_span(fd, start, sum(into.nbytes for into in buffers), self._scratch)
        for into in buffers:
            into[:], from_here = from_here[: into.nbytes], from_here[into.nbytes :]


def _aligned(buffer: Bytes) -> bool:
    return buffer.ctypes.data % ALIGNMENT == buffer.nbytes % ALIGNMENT == 0


def _runs(layout: KVLayout, of: ExtentChunks, fd: int, known: _Known) -> Iterator[_PartRun]:
    """Yield where the bytes of all reads of an extent lie."""
    sizes, starts, sums = _tables(layout, of.rows)
    for read in of.reads:
        layer, kv, first, stop, _ = read
        at, count, size = sums[layer][kv] + first, stop - first, sizes[kv]
        assert sum(into.nbytes for into in read.into) == size * count, (first, stop)
        wanted = known.sums[4 * at : 4 * (at + count)]
        yield _PartRun(read, of.extent, fd, starts[layer][kv] + first * size, size, count, wanted)


def _places(into: Bytes, size: int) -> range:
    """List the addresses of the parts of a buffer."""
    about = into.__array_interface__
    assert about["strides"] is None, "a buffer with gaps"
    address: int = about["data"][0]
    return range(address, address + into.nbytes, size)


def _verify(runs: Sequence[_PartRun], states: States, sums: array[int]) -> None:
    """Compare the checksums of all that has come. Raises: DamageError."""
    nothing = {at: bytes(len(runs[at].wanted)) for at, state in enumerate(states) if state == LEFT_OUT}
    wanted = array("I", b"".join(nothing.get(at, run.wanted) for at, run in enumerate(runs)))
    if sums == wanted:
        return
    wrong = next(at for at, (found, right) in enumerate(zip(sums, wanted, strict=True)) if found != right)
    for run in runs:
        if wrong < run.parts:
            with naming(run.extent, "reading"):
                raise DamageError(f"layer {run.read.layer}, {TENSORS[run.read.kv]}, part {run.read.first + wrong}")
        wrong -= run.parts


@lru_cache(256)
def _tables(layout: KVLayout, rows: int) -> _PartTables:
    layers, chunks, parts = range(layout.layers), layout.file_chunks(rows), layout.file_parts(rows)
    kinds = (KEYS, VALUES, PROBES, MEANS)
    sizes = [layout.part_bytes, layout.part_bytes, layout.probe_chunk_bytes, layout.mean_bytes(rows)]
    starts = [[layout.offset(rows, layer, kv) for kv in kinds] for layer in layers]
    probes = 2 * layout.layers * parts
    means = probes + layout.layers * chunks
    sums = [[2 * layer * parts, (2 * layer + 1) * parts, probes + layer * chunks, means + layer] for layer in layers]
    return _PartTables(sizes, starts, sums)


def _sums_of(head: Head) -> bytes:
    """Put the checksums of a head's parts one after another: of keys and values, of probe keys, of means."""
    sidecar = head.sidecar
    assert sidecar is not None, "a layout without probe heads"
    of_parts = head.crcs if sidecar.parts is None else sidecar.parts
    tables = (of_parts, sidecar.crcs, sidecar.means)
    return b"".join(table.astype("=u4").tobytes() for table in tables if table is not None)
