"""Reads of many parts at a time: what the compiled kernels and Python read is the same, and so is what they say of faults."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import DamageError, StoreError
from afterglow.store.extents import chunk_reader, pieces
from afterglow.store.extents.chunks import BEGUN, LEFT_OUT, TAKEN_BACK, ChunkRead, ExtentChunks, Stale
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.layout import ALIGNMENT, KEYS, MEANS, PROBES, VALUES, KVLayout
from tests.store.store_kit import DIGEST, arena_of, extent_name, record
from tests.store.test_chunks import LAYOUTS

ROWS = (150, 64, 300)  # of three extents
WAYS = ["python", *(["kernels"] if pieces.kernels() is not None else [])]


def nothing(*_: Any) -> None: ...


class Folder:
    """Three extents on disk."""

    def __init__(self, path: Path, layout: KVLayout) -> None:
        self.layout, self.tier = layout, DiskTier(path, layout, DIGEST)
        self.names = [extent_name(number) for number in range(len(ROWS))]
        for number, rows in enumerate(ROWS):
            blocks = layout.blocks(rows)
            self.tier.write(record(number, rows), arena_of(layout, blocks, number), range(blocks), nothing)
        asked = [ExtentChunks(name, rows, "", []) for name, rows in zip(self.names, ROWS, strict=True)]
        self.editions = [head.edition for head in self.tier.read_chunks(asked)[1]]

    def size(self, number: int, kv: int) -> int:
        layout = self.layout
        return {PROBES: layout.probe_chunk_bytes, MEANS: layout.mean_bytes(ROWS[number])}.get(kv, layout.part_bytes)

    def parts(self, number: int, kv: int) -> int:
        layout, rows = self.layout, ROWS[number]
        return {PROBES: layout.file_chunks(rows), MEANS: 1}.get(kv, layout.file_parts(rows))

    def offset(self, number: int, read: ChunkRead) -> int:
        start = self.layout.offset(ROWS[number], read.layer, read.kv)
        return start + read.first * self.size(number, read.kv)

    def path(self, number: int) -> Path:
        return self.tier.path(self.names[number])

    def asked(self, reads: Sequence[tuple[int, ChunkRead]]) -> list[ExtentChunks]:
        """By extent, in the order in which these are first named."""
        numbers = dict.fromkeys(number for number, _ in reads)
        return [
            ExtentChunks(self.names[n], ROWS[n], self.editions[n], [read for at, read in reads if at == n])
            for n in numbers
        ]


class Drawn(NamedTuple):
    """A read to come: the buffers' bytes in parts, and how far behind a page each begins."""

    number: int
    layer: int
    kv: int
    first: int
    cuts: list[int]
    shift: int

    def read(self, size: int) -> ChunkRead:
        into = []
        for parts in self.cuts:
            memory = np.zeros(parts * size + 2 * ALIGNMENT, np.uint8)
            at = -memory.ctypes.data % ALIGNMENT + self.shift
            into.append(memory[at : at + parts * size])
        return ChunkRead(self.layer, self.kv, self.first, self.first + sum(self.cuts), into)


@st.composite
def drawn(draw: st.DrawFn, folder: Folder) -> Drawn:
    number = draw(st.integers(0, len(ROWS) - 1))
    kv = draw(st.sampled_from([KEYS, VALUES, PROBES, *([MEANS] if folder.layout.means else [])]))
    first = draw(st.integers(0, folder.parts(number, kv) - 1))
    left, cuts = folder.parts(number, kv) - first, []
    while left and (not cuts or draw(st.booleans())):
        cuts.append(draw(st.integers(1, left)))
        left -= cuts[-1]
    layer = draw(st.integers(0, folder.layout.layers - 1))
    return Drawn(number, layer, kv, first, cuts, draw(st.sampled_from([0, 0, 1, 32, 4000])))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(chunk_reader, "kernels", lambda: None)
    return str(request.param)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("extents"), request.param)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_both_ways_bring_what_the_files_hold(folder: Folder, data: st.DataObject) -> None:
    reads = data.draw(st.lists(drawn(folder), min_size=1, max_size=12))
    back = data.draw(st.sets(st.integers(0, len(reads) - 1)))
    counted = []
    for way in WAYS:
        these = [(each.number, each.read(folder.size(each.number, each.kv))) for each in reads]
        asked = folder.asked(these)
        ordered = [pair for number in dict.fromkeys(n for n, _ in these) for pair in these if pair[0] == number]
        states = bytearray(TAKEN_BACK if at in back else 0 for at in range(len(these)))
        with pytest.MonkeyPatch.context() as patch:
            if way == "python":
                patch.setattr(chunk_reader, "kernels", lambda: None)
            moved, heads = folder.tier.read_chunks(asked, states)
        assert [head.record.id for head in heads] == [each.extent for each in asked]
        assert list(states) == [LEFT_OUT if at in back else BEGUN for at in range(len(these))]
        for at, (number, read) in enumerate(ordered):
            start, found = folder.offset(number, read), np.concatenate(read.into)
            wanted = folder.path(number).read_bytes()[start : start + found.nbytes]
            assert found.tobytes() == (bytes(found.nbytes) if at in back else wanted)
        counted.append(moved)
    pages = [
        -(-(start + sum(into.nbytes for into in read.into)) // ALIGNMENT) - start // ALIGNMENT
        for at, (number, read) in enumerate(ordered)
        if at not in back
        for start in [folder.offset(number, read)]
    ]
    assert set(counted) == {sum(pages) * ALIGNMENT}


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_damaged_byte_is_found_where_it_is(folder: Folder, data: st.DataObject) -> None:
    reads = data.draw(st.lists(drawn(folder), min_size=1, max_size=6))
    wrong = data.draw(st.sampled_from(reads))
    size = folder.size(wrong.number, wrong.kv)
    part = data.draw(st.integers(0, sum(wrong.cuts) - 1))
    at = folder.offset(wrong.number, wrong.read(size)) + part * size + data.draw(st.integers(0, size - 1))
    tensor = ("keys", "values", "probe keys", "means")[wrong.kv]
    with damaged(folder.path(wrong.number), at):
        for way in WAYS:
            asked = folder.asked([(each.number, each.read(folder.size(each.number, each.kv))) for each in reads])
            with pytest.MonkeyPatch.context() as patch, pytest.raises(DamageError) as found:
                if way == "python":
                    patch.setattr(chunk_reader, "kernels", lambda: None)
                folder.tier.read_chunks(asked)
            name = folder.names[wrong.number][:16]
            assert str(found.value) == f"extent {name}: layer {wrong.layer}, {tensor}, part {wrong.first + part}"


@contextmanager
def damaged(path: Path, at: int) -> Iterator[None]:
    """One byte of a file is wrong for a while; its inode and the time of its last change stay."""

    def flip() -> None:
        status = os.stat(path)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    flip()
    try:
        yield
    finally:
        flip()


def one_of_each(folder: Folder, layer: int = 1) -> list[tuple[int, ChunkRead]]:
    return [
        (number, Drawn(number, layer, kv, 0, [1], 0).read(folder.size(number, kv)))
        for number in range(len(ROWS))
        for kv in (KEYS, VALUES, PROBES)
    ]


def test_a_part_that_is_left_out_may_be_damaged(folder: Folder, way: str) -> None:
    reads = one_of_each(folder)
    with damaged(folder.path(0), folder.offset(0, reads[1][1])):
        states = bytearray(len(reads))
        states[1] = TAKEN_BACK
        folder.tier.read_chunks(folder.asked(reads), states)


def on_opening(monkeypatch: pytest.MonkeyPatch, folder: Folder, act: Callable[[int, Path], int]) -> None:
    """Do something to the first extent's descriptor, or its file, just after it was opened. `act` returns the descriptor."""
    real, path = pieces.open_extent, folder.path(0)

    def opened(where: Any, layout: KVLayout, extent: str, rows: int) -> tuple[int, bool]:
        fd, direct = real(where, layout, extent, rows)
        return (act(fd, path) if extent == folder.names[0] else fd), direct

    monkeypatch.setattr(pieces, "open_extent", opened)


@pytest.fixture
def fresh(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "extents", LAYOUTS[0])


def test_an_error_of_the_system(fresh: Folder, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A descriptor that may not be read from."""

    def for_writing(fd: int, path: Path) -> int:
        os.close(fd)
        return os.open(path, os.O_WRONLY)

    with monkeypatch.context() as patch:
        on_opening(patch, fresh, for_writing)
        with pytest.raises(StoreError, match=f"reading extent {fresh.names[0][:16]}: {os.strerror(errno.EBADF)}"):
            fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)[:3]))
        with pytest.raises(StoreError, match=f"reading extent one of 3: {os.strerror(errno.EBADF)}"):
            fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))
    fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))


def test_a_file_that_is_cut_while_it_is_read(fresh: Folder, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def cut(fd: int, path: Path) -> int:
        os.truncate(path, fresh.layout.head_bytes(ROWS[0]))
        return fd

    on_opening(monkeypatch, fresh, cut)
    with pytest.raises(DamageError, match="the file ends early"):
        fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))


def test_a_file_that_is_too_short(fresh: Folder, way: str) -> None:
    os.truncate(fresh.path(1), 4096)
    with pytest.raises(DamageError, match=f"extent {fresh.names[1][:16]}: 4096 bytes long instead of"):
        fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))


def test_a_file_that_is_gone(fresh: Folder, way: str) -> None:
    fresh.path(1).unlink()
    with pytest.raises(StoreError, match=f"extent {fresh.names[1][:16]}: {os.strerror(errno.ENOENT)}"):
        fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))


def test_one_file_of_another_edition(fresh: Folder, way: str) -> None:
    draw = np.random.default_rng(0)
    orders = np.array([draw.permutation(ROWS[2]) for _ in range(fresh.layout.layers)], np.uint16)
    rewriting = fresh.tier.rewriting(fresh.names[2], ROWS[2], lambda: orders)
    while rewriting.go_on():
        pass
    assert rewriting.publish()
    with pytest.raises(Stale, match=fresh.names[2][:16]) as stale:
        fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))
    assert stale.value.bytes == fresh.layout.head_bytes(ROWS[2])


def open_files() -> set[str]:
    names = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return {name for name in names if name.endswith(".safetensors")}


@pytest.fixture(autouse=True)
def _no_file_stays_open() -> Iterator[None]:
    yield
    assert not open_files()


@pytest.mark.skipif("kernels" not in WAYS, reason="no compiled kernels")
def test_all_parts_of_all_extents_come_by_one_call(fresh: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looks at folders and files by Python, which has each file opened by one call too."""
    calls: list[str] = []
    for module, name in ((pieces, "preadv_parts"), (os, "preadv"), (os, "lstat"), (os, "open")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    fresh.tier.read_chunks(fresh.asked([*one_of_each(fresh, 0), *one_of_each(fresh, 1)]))
    assert calls == ["preadv_parts"]


def test_few_files_are_open_at_a_time(fresh: Folder, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(chunk_reader, "FILES_AT_ONCE", 2)
    most, real = [0], pieces.open_extent

    def counted(*args: Any) -> Any:
        opened = real(*args)
        most.append(len(open_files()))
        return opened

    monkeypatch.setattr(pieces, "open_extent", counted)
    reads = one_of_each(fresh)
    states = bytearray(len(reads))
    states[-1] = TAKEN_BACK
    fresh.tier.read_chunks(fresh.asked(reads), states)
    assert max(most) == 2
    assert list(states) == [*[BEGUN] * (len(reads) - 1), LEFT_OUT]


def test_buffers_are_of_whole_parts(fresh: Folder, way: str) -> None:
    def of(*into: Bytes) -> list[ExtentChunks]:
        return fresh.asked([(0, ChunkRead(0, KEYS, 0, 2, into))])

    size = fresh.layout.part_bytes
    with pytest.raises(AssertionError):
        fresh.tier.read_chunks(of(np.empty(size, np.uint8)))
    with pytest.raises((AssertionError, ValueError)):
        fresh.tier.read_chunks(of(np.empty(4 * size, np.uint8)[::2]))


def test_without_direct_transfers(fresh: Folder, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As on a file system that refuses them: whole pages are counted all the same."""
    direct, _ = fresh.tier.read_chunks(fresh.asked(one_of_each(fresh)))
    monkeypatch.setattr(fresh.tier.folder, "direct", False)
    reads = one_of_each(fresh)
    cached, _ = fresh.tier.read_chunks(fresh.asked(reads))
    assert cached == direct
    for number, read in reads:
        start = fresh.offset(number, read)
        assert read.into[0].tobytes() == fresh.path(number).read_bytes()[start:][: read.into[0].nbytes]
