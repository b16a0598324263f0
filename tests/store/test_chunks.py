"""Parts of extents: chunks of keys, values and probe keys; rows stored in another order; versions and damage."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from afterglow.errors import ConfigError, DamageError
from afterglow.kernels.stored_rows import narrowed, widened
from afterglow.plan.step import DEMAND, PREFETCH, Load
from afterglow.store.extents.chunks import ChunkRead, ExtentChunks, Stale
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.head import Head
from afterglow.store.extents.layout import KEYS, MEANS, PROBES, VALUES, KVLayout
from afterglow.store.extents.means import chunk_means
from afterglow.store.extents.tier import ExtentRead
from afterglow.store.moving.reading import ChunkIO, Reading
from tests import doors
from tests.store.store_kit import DIGEST, Kit, arena_of, contents, extent_name, record

DIRECT = KVLayout(2, 4, 16, "F32", probe_heads=2)  # chunks of 16 KiB, of probe keys 8 KiB
SMALL = KVLayout(3, 2, 8, "F32", probe_heads=1)  # chunks of probe keys of 2 KiB: two make a page
EIGHT_BITS = KVLayout(3, 3, 7, "I8", probe_heads=2)  # rows of 33 bytes: chunks start anywhere
PARTS = KVLayout(2, 4, 16, "F32", probe_heads=2, part_rows=16)
AVERAGED = replace(PARTS, means=True)
LAYOUTS = [DIRECT, SMALL, KVLayout(2, 3, 6, "BF16", 3, means=True), replace(EIGHT_BITS, means=True), PARTS, AVERAGED]
ROWS = 150


def nothing(*_: Any) -> None: ...


class Stored:
    """One extent on disk, and what it holds: uint8 [layers, 2, rows, row_bytes]."""

    def __init__(self, folder: Path, layout: KVLayout, rows: int = ROWS) -> None:
        self.layout, self.rows, self.name = layout, rows, extent_name(5)
        self.tier = DiskTier(folder, layout, DIGEST)
        self.arena = arena_of(layout, 2 * layout.blocks(rows))
        self.slots = list(range(layout.blocks(rows)))[::-1]
        self.held = contents(self.arena, self.slots, rows)
        self.written = self.tier.write(record(5, rows), self.arena, self.slots, nothing)

    def edition(self) -> str:
        return self.head().edition

    def head(self) -> Head:
        _, (head,) = self.tier.read_chunks([ExtentChunks(self.name, self.rows, "", [])])
        return head

    def read(self, edition: str, *reads: ChunkRead) -> int:
        moved, _ = self.tier.read_chunks([ExtentChunks(self.name, self.rows, edition, reads)])
        return moved

    def rewrite(self, orders: np.ndarray) -> int:
        """Rows in another order, in one go; the bytes written."""
        rewriting = self.tier.rewriting(self.name, self.rows, lambda: orders)
        assert rewriting.needed
        while rewriting.go_on():
            pass
        assert rewriting.publish()
        self.tier.rewritten(self.name)
        return rewriting.written

    def chunks(self, layer: int, kv: int, first: int, stop: int, edition: str | None = None) -> np.ndarray:
        """As they are stored."""
        each = 1 if kv == PROBES else 64 // self.layout.part_rows
        return self.parts(layer, kv, first * each, stop * each, edition).reshape((stop - first) * 64, -1)

    def parts(self, layer: int, kv: int, first: int, stop: int, edition: str | None = None) -> np.ndarray:
        size = self.layout.probe_chunk_bytes if kv == PROBES else self.layout.part_bytes
        into = np.empty((stop - first, size), np.uint8)
        edition = self.edition() if edition is None else edition
        self.read(edition, ChunkRead(layer, kv, first, stop, into))
        return into

    def means(self, layer: int, edition: str | None = None) -> np.ndarray:
        into = np.empty((1, self.layout.mean_bytes(self.rows)), np.uint8)
        edition = self.edition() if edition is None else edition
        self.read(edition, ChunkRead(layer, MEANS, 0, 1, into))
        return into.view(np.float32).reshape(-1, self.layout.kv_heads, self.layout.head_dim)

    def wanted(self, layer: int, kv: int) -> np.ndarray:
        """Rows of the text, padded with zeros."""
        rows = self.held[layer, KEYS if kv == PROBES else kv]
        if kv == PROBES:
            rows = rows[:, : self.layout.probe_row_bytes]
        padded = np.zeros((self.layout.padded_rows(self.rows), rows.shape[1]), np.uint8)
        padded[: self.rows] = rows
        return padded

    def whole(self, blocks: int | None = None) -> np.ndarray:
        slots = list(range(self.layout.blocks(self.rows), self.arena.slots))[:blocks]
        self.tier.read(ExtentRead(self.name, self.rows, self.arena, slots), nothing)
        return contents(self.arena, slots, min(self.rows, 64 * len(slots)))

    def orders(self, seed: int = 0) -> np.ndarray:
        draw = np.random.default_rng(seed)
        return np.array([draw.permutation(self.rows) for _ in range(self.layout.layers)], np.uint16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_are_what_was_written(tmp_path: Path, layout: KVLayout) -> None:
    stored = Stored(tmp_path, layout)
    assert stored.written == layout.file_bytes(ROWS) == stored.tier.path(stored.name).stat().st_size
    for layer in range(layout.layers):
        for kv in (KEYS, VALUES, PROBES):
            for first, stop in ((0, 3), (0, 1), (2, 3), (1, 3)):
                found = stored.chunks(layer, kv, first, stop)
                assert np.array_equal(found, stored.wanted(layer, kv)[64 * first : 64 * stop])
    assert np.array_equal(stored.whole(), stored.held)
    tensors = load_file(stored.tier.path(stored.name)) if layout.dtype == "F32" else {}
    for layer in range(layout.layers if tensors else 0):
        keys = tensors[f"layers.{layer}.keys"]
        assert tensors[f"layers.{layer}.probe_keys"].tobytes() == keys[:, : layout.probe_heads].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_another_order_is_another_version(tmp_path: Path, layout: KVLayout) -> None:
    stored = Stored(tmp_path, layout)
    for version in (1, 2):
        orders, before = stored.orders(version), stored.edition()
        assert stored.rewrite(orders) == layout.file_bytes(ROWS)
        head = stored.head()
        assert head.sidecar is not None
        assert head.sidecar.version == version
        assert np.array_equal(head.sidecar.order[:, :ROWS], orders)
        for layer in range(layout.layers):
            for kv in (KEYS, VALUES, PROBES):
                found = stored.chunks(layer, kv, 0, 3, head.edition)
                assert np.array_equal(found[:ROWS], stored.wanted(layer, kv)[orders[layer]])
        with pytest.raises(Stale):
            stored.chunks(0, KEYS, 0, 1, before)
        # A read of the whole extent, or of its first blocks, does not show the order.
        assert np.array_equal(stored.whole(), stored.held)
        assert np.array_equal(stored.whole(blocks=1), stored.held[:, :, :64])
        stored.tier.verify(stored.name)


@given(rows=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_any_order_of_any_length(tmp_path_factory: pytest.TempPathFactory, rows: int, seed: int) -> None:
    stored = Stored(tmp_path_factory.mktemp("x"), SMALL, rows)
    if rows > 64:  # in one chunk nothing is gained
        stored.rewrite(stored.orders(seed))
    assert np.array_equal(stored.whole(), stored.held)


@pytest.mark.parametrize("part_rows", [16, 32])
def test_parts_of_a_chunk_are_read_and_checked_by_themselves(tmp_path: Path, part_rows: int) -> None:
    stored = Stored(tmp_path, replace(DIRECT, part_rows=part_rows))
    orders = stored.orders()
    for version in range(2):
        for kv in (KEYS, VALUES):
            wanted = stored.wanted(1, kv)
            if version:
                wanted[:ROWS] = wanted[orders[1]]
            for part in range(192 // part_rows):
                found = stored.parts(1, kv, part, part + 1).reshape(part_rows, -1)
                assert np.array_equal(found, wanted[part_rows * part :][:part_rows])
        if not version:
            stored.rewrite(orders)
    path, edition = stored.tier.path(stored.name), stored.edition()
    damaged = bytearray(path.read_bytes())
    damaged[stored.layout.offset(ROWS, 1, VALUES) + 2 * stored.layout.part_bytes] ^= 1
    path.write_bytes(damaged)
    for part in range(192 // part_rows):
        if part != 2:
            stored.parts(1, VALUES, part, part + 1, edition)
    with pytest.raises(DamageError, match="values, part 2"):
        stored.parts(1, VALUES, 1, 3, edition)


def test_parts_need_probe_heads() -> None:
    for probe_heads, part_rows in ((0, 16), (2, 8), (2, 128)):
        with pytest.raises(ConfigError, match="16, 32 or 64 rows"):
            KVLayout(2, 4, 16, "F32", probe_heads, part_rows)


@pytest.mark.parametrize("layout", [DIRECT, SMALL, PARTS, AVERAGED], ids=str)
def test_every_damaged_byte_is_found(tmp_path: Path, layout: KVLayout) -> None:
    stored = Stored(tmp_path, layout)
    stored.rewrite(stored.orders())
    path, edition = stored.tier.path(stored.name), stored.edition()
    good = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(good), 60).tolist():
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(DamageError):
            stored.tier.verify(stored.name)
        with pytest.raises((DamageError, Stale)):
            for layer in range(layout.layers):
                for kv in (KEYS, VALUES, PROBES):
                    stored.chunks(layer, kv, 0, layout.file_chunks(ROWS), edition)
                if layout.means:
                    stored.means(layer, edition)
    path.write_bytes(good[:-1])
    with pytest.raises(DamageError, match="bytes long"):
        stored.chunks(0, KEYS, 0, 1, edition)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_rewriting_that_is_given_up_leaves_what_was_there(tmp_path: Path, layers: int) -> None:
    stored = Stored(tmp_path, DIRECT)
    before = stored.edition()
    rewriting = stored.tier.rewriting(stored.name, ROWS, stored.orders)
    for _ in range(layers):
        rewriting.go_on()
    del rewriting
    assert stored.edition() == before
    assert np.array_equal(stored.whole(), stored.held)
    assert stored.tier.folder.leftovers() == []


def test_rows_that_lie_so_already_are_not_written_again(tmp_path: Path) -> None:
    """What counts is the order that is on disk, and there in which chunk a row is."""
    stored = Stored(tmp_path, DIRECT)
    orders = stored.orders()
    stored.rewrite(orders)
    within = np.stack([np.concatenate([order[:64][::-1], order[64:]]) for order in orders])
    for same in (orders, within):
        assert not stored.tier.rewriting(stored.name, ROWS, same.copy).needed
    text = np.tile(np.arange(ROWS, dtype=np.uint16), (DIRECT.layers, 1))
    assert stored.tier.rewriting(stored.name, ROWS, text.copy).needed
    assert stored.tier.folder.leftovers() == []


@pytest.mark.parametrize("meanwhile", ["dropped", "written anew"])
def test_a_new_version_takes_nobody_elses_place(tmp_path: Path, meanwhile: str) -> None:
    stored = Stored(tmp_path, DIRECT)
    rewriting = stored.tier.rewriting(stored.name, ROWS, stored.orders)
    while rewriting.go_on():
        pass
    stored.tier.delete(stored.name)
    if meanwhile == "written anew":
        stored.tier.write(record(5, ROWS), stored.arena, stored.slots, nothing)
        before = stored.edition()
    assert not rewriting.publish()
    assert stored.tier.folder.leftovers() == []
    assert stored.tier.path(stored.name).exists() == (meanwhile == "written anew")
    if meanwhile == "written anew":
        assert stored.edition() == before


@pytest.mark.parametrize(
    ("dtype", "stored_as"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("I8", torch.int8)],
)
def test_means_are_those_of_each_64_rows_of_the_text(tmp_path: Path, dtype: str, stored_as: torch.dtype) -> None:
    """Of what is stored, whatever order the rows are put in later."""
    layout = KVLayout(2, 3, 8, dtype, probe_heads=1, means=True)
    stored = Stored(tmp_path, layout, rows=ROWS)
    real = torch.randn(2, 2, ROWS, 3, 8, generator=torch.Generator().manual_seed(0))
    rows = narrowed(real.flatten(0, 2), stored_as)
    wide = widened(rows, torch.float32).view(2, 2, ROWS, 3, 8)
    for at, slot in enumerate(stored.slots):
        some = rows.view(torch.uint8).view(2, 2, ROWS, -1)[:, :, 64 * at : 64 * at + 64].numpy()
        stored.arena.rows[:, :, slot, : some.shape[2]] = some
    stored.held = contents(stored.arena, stored.slots, ROWS)
    stored.tier.write(record(5, ROWS), stored.arena, stored.slots, nothing)
    for version in (0, 1):
        for layer in range(2):
            found = torch.from_numpy(stored.means(layer))
            for kv in (KEYS, VALUES):
                for chunk in range(3):
                    mean = wide[layer, kv, 64 * chunk : 64 * chunk + 64].mean(0)
                    torch.testing.assert_close(found[kv * layout.file_chunks(ROWS) + chunk], mean, atol=1e-5, rtol=1e-4)
        if not version:
            stored.rewrite(stored.orders())
    stored.tier.verify(stored.name)
    assert np.array_equal(stored.whole(), stored.held)


def test_numbers_that_are_not_finite_have_means_without_warnings() -> None:
    rows = np.full((1, 64, AVERAGED.row_bytes), 0xFF, np.uint8)
    assert np.isnan(chunk_means(AVERAGED, 64, rows, rows).view(np.float32)[: 4 * 16]).all()


def test_means_need_probe_heads() -> None:
    with pytest.raises(ConfigError, match="with probe heads only"):
        KVLayout(2, 4, 16, "F32", means=True)


def test_probe_heads_are_among_the_heads() -> None:
    with pytest.raises(ConfigError, match="5 probe heads are not among 4"):
        KVLayout(2, 4, 16, "F32", probe_heads=5)


def begun(reader: ChunkIO, edition: str, *reads: ChunkRead) -> Reading:
    return reader.read([ExtentChunks(extent_name(5), ROWS, edition, reads)], DEMAND)


def edition_of(reader: ChunkIO) -> str:
    reading = begun(reader, "")
    assert reading.wait(10)
    return reading.heads[extent_name(5)].edition


def test_through_the_store_and_a_restart(tmp_path: Path) -> None:
    with Kit(tmp_path, DIRECT) as kit:
        slots = (3, 4, 5)
        held = contents(kit.store.arena, slots, ROWS)
        kit.put(5, ROWS, slots)
        reader = kit.store.chunks
        assert reader is not None
        into = np.empty((2, DIRECT.chunk_bytes), np.uint8)
        reading = begun(reader, edition_of(reader), ChunkRead(1, VALUES, 0, 2, into))
        assert reading.wait(10)
        assert np.array_equal(into.reshape(128, -1), held[1, VALUES, :128])
        orders = np.tile(np.arange(ROWS, dtype=np.uint16)[::-1], (2, 1))
        edition = edition_of(reader)
        rewrite = reader.rewrite(extent_name(5), orders.copy)
        kit.settle()
        assert rewrite.ended
        assert rewrite.written
        again = reader.rewrite(extent_name(5), orders.copy)
        kit.settle()
        assert again.ended
        assert not again.written
        stale = begun(reader, edition, ChunkRead(1, VALUES, 0, 2, into))
        assert not stale.wait(10)
        assert stale.stale
        assert not reader.read([ExtentChunks(extent_name(6), ROWS, "", [])], DEMAND).wait(10)
        stats = kit.store.stats()
        assert stats.chunk_reads == 4  # two heads, two chunks; one call found another version and read its head
        assert stats.chunk_read_bytes >= into.nbytes
        assert stats.errors == {"missing": 1}
    with Kit(tmp_path, DIRECT) as kit:
        reader = kit.store.chunks
        assert reader is not None
        reading = begun(reader, "")
        assert reading.wait(10)
        sidecar = reading.heads[extent_name(5)].sidecar
        assert sidecar is not None
        assert sidecar.version == 1


def test_reads_that_have_not_begun_can_be_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, gate, held_one = DiskTier.read_chunks, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        held_one.set()
        gate.wait(20)
        return read(*args)

    with Kit(tmp_path, DIRECT, threads=1) as kit:
        slots = (3, 4, 5)
        stored = contents(kit.store.arena, slots, ROWS)
        kit.put(5, ROWS, slots)
        reader = kit.store.chunks
        assert reader is not None
        edition = edition_of(reader)
        monkeypatch.setattr(DiskTier, "read_chunks", held)
        buffers = [np.zeros((1, DIRECT.chunk_bytes), np.uint8) for _ in range(4)]
        reads = [ChunkRead(1, VALUES, 0, 1, into) for into in buffers]
        first = begun(reader, edition, reads[0])
        whole = begun(reader, edition, reads[1])
        part = begun(reader, edition, *reads[2:])
        assert held_one.wait(10)
        assert whole.take_back(0)
        assert part.take_back(1)
        assert not part.take_back(1)  # again
        gate.set()
        assert first.wait(10)
        assert part.wait(10)
        kit.settle()
        assert not first.take_back(0)  # too late
        assert whole.ended
        assert whole.bytes == 0
        for into, wanted in zip(buffers, (True, False, True, False), strict=True):
            assert np.array_equal(into.reshape(64, -1), stored[1, VALUES, :64]) == wanted


@pytest.fixture
def guessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kit, ChunkIO, str, threading.Event]]:
    """A store of two threads, of which one sits in a guess until the event is set: values of layer 1, to be read into zeros."""
    read, gate, held_one = DiskTier.read_chunks, threading.Event(), threading.Event()

    def held(tier: DiskTier, asked: Sequence[ExtentChunks], states: Any = None) -> Any:
        if any(one.layer == 1 and one.kv == VALUES for each in asked for one in each.reads):
            held_one.set()
            assert gate.wait(20)
        return read(tier, asked, states)

    with Kit(tmp_path, DIRECT, threads=2) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        reader = kit.store.chunks
        assert reader is not None
        edition = edition_of(reader)
        monkeypatch.setattr(DiskTier, "read_chunks", held)
        guess = guessed(reader, edition)
        assert held_one.wait(10)
        assert not guess.ended
        yield kit, reader, edition, gate
        gate.set()
        kit.settle()
        assert guess.ended


def guessed(reader: ChunkIO, edition: str) -> Reading:
    into = np.zeros((1, DIRECT.chunk_bytes), np.uint8)
    return reader.read([ExtentChunks(extent_name(5), ROWS, edition, [ChunkRead(1, VALUES, 0, 1, into)])], PREFETCH)


def test_what_is_wanted_at_once_overtakes_guesses(guessing: tuple[Kit, ChunkIO, str, threading.Event]) -> None:
    """Of the same extent too; and further guesses leave the last thread to it."""
    kit, reader, edition, gate = guessing
    later = guessed(reader, edition)
    for _ in range(3):
        into = np.empty((2, DIRECT.chunk_bytes), np.uint8)
        assert begun(reader, edition, ChunkRead(0, KEYS, 0, 2, into)).wait(10)
    kit.store.start([Load(77, extent_name(5), ROWS, (10, 11, 12))])
    assert kit.store.wait_layer(77, 1, 10)
    assert not later.ended
    reader.urge([later])
    gate.set()
    assert later.wait(10)


def test_a_guess_that_is_wanted_after_all_takes_the_last_thread(
    guessing: tuple[Kit, ChunkIO, str, threading.Event],
) -> None:
    _, reader, edition, _ = guessing
    into = np.zeros((1, DIRECT.chunk_bytes), np.uint8)
    reading = reader.read([ExtentChunks(extent_name(5), ROWS, edition, [ChunkRead(0, KEYS, 0, 1, into)])], PREFETCH)
    assert not reading.wait(0.05)
    reader.urge([reading])
    assert reading.wait(10)


def both(edition: str, other: str) -> tuple[list[ExtentChunks], list[np.ndarray]]:
    """Parts of two extents."""
    into = [np.zeros((1, DIRECT.chunk_bytes), np.uint8) for _ in range(2)]
    editions = {extent_name(5): edition, extent_name(6): other}
    asked = [
        ExtentChunks(name, ROWS, editions[name], [ChunkRead(1, VALUES, 1, 2, memory)])
        for name, memory in zip(editions, into, strict=True)
    ]
    return asked, into


@pytest.mark.parametrize("what", ["damaged", "gone", "nothing"])
def test_of_several_extents_the_lost_one_is_named(tmp_path: Path, what: str) -> None:
    with Kit(tmp_path, DIRECT) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        kit.put(6, ROWS, (6, 7, 8))
        held = contents(kit.store.arena, (3, 4, 5), ROWS)
        reader = kit.store.chunks
        assert reader is not None
        heads = reader.read([ExtentChunks(extent_name(n), ROWS, "", []) for n in (5, 6)], DEMAND)
        assert heads.wait(10)
        asked, into = both(*(head.edition for head in heads.heads.values()))
        path = kit.file(6)
        if what == "damaged":
            data = bytearray(path.read_bytes())
            data[DIRECT.offset(ROWS, 1, VALUES, 1)] ^= 1
            path.write_bytes(data)
        elif what == "gone":
            path.unlink()
        reading = reader.read(asked, DEMAND)
        assert reading.wait(10) == (what == "nothing")
        assert reading.ended
        kit.settle()
        assert np.array_equal(into[0].reshape(64, -1), held[1, VALUES, 64:128])
        assert reading.lost == (None if what == "nothing" else extent_name(6))
        assert reading.heads.keys() == {extent_name(5), *([extent_name(6)] if what == "nothing" else [])}
        errors = {"damaged": {"damage": 1}, "gone": {"missing": 1}, "nothing": {}}[what]
        assert kit.store.stats().errors == errors
        assert (extent_name(6) in kit.store.on_disk) == (what == "nothing")
        assert extent_name(5) in kit.store.on_disk


def test_a_fault_that_passes_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file that is replaced just while it is read: in the order of its extent it is read again."""
    with Kit(tmp_path, DIRECT) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        kit.put(6, ROWS, (6, 7, 8))
        reader = kit.store.chunks
        assert reader is not None
        heads = reader.read([ExtentChunks(extent_name(n), ROWS, "", []) for n in (5, 6)], DEMAND)
        assert heads.wait(10)
        asked, _ = both(*(head.edition for head in heads.heads.values()))
        real, faults = DiskTier.read_chunks, [DamageError("for a moment")]

        def passing(*args: Any) -> Any:
            if faults:
                raise faults.pop()
            return real(*args)

        monkeypatch.setattr(DiskTier, "read_chunks", passing)
        before = kit.store.stats().chunk_read_bytes
        reading = reader.read(asked, DEMAND)
        assert reading.wait(10)
        kit.settle()
        assert reading.ended
        assert reading.lost is None
        assert reading.bytes == kit.store.stats().chunk_read_bytes - before == 2 * DIRECT.chunk_bytes
        assert kit.store.stats().errors == {}


@pytest.mark.parametrize("threads", [2, 3])
def test_what_is_read_waits_for_no_rewriting(tmp_path: Path, threads: int) -> None:
    """A new version is made beside the old one, which chunks and whole extents are read from meanwhile."""
    with Kit(tmp_path, DIRECT, threads=threads) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        held = contents(kit.store.arena, (3, 4, 5), ROWS)
        reader = kit.store.chunks
        assert reader is not None
        edition, working, gate = edition_of(reader), threading.Event(), threading.Event()

        def orders() -> np.ndarray:
            working.set()
            assert gate.wait(20)
            return np.tile(np.arange(ROWS, dtype=np.uint16)[::-1], (2, 1))

        rewrite = reader.rewrite(extent_name(5), orders)
        assert working.wait(10)
        into = np.empty((2, DIRECT.chunk_bytes), np.uint8)
        assert begun(reader, edition, ChunkRead(1, VALUES, 0, 2, into)).wait(10)
        assert np.array_equal(into.reshape(128, -1), held[1, VALUES, :128])
        kit.store.start([Load(77, extent_name(5), ROWS, (10, 11, 12))])
        assert kit.store.wait_layer(77, 1, 10)
        assert not rewrite.ended
        gate.set()
        kit.settle()
        assert rewrite.written
        assert edition_of(reader) != edition


def test_a_rewriting_lets_others_go_first_after_each_layer(tmp_path: Path) -> None:
    """With one thread for all: what comes later and is more urgent is done before it goes on."""
    with Kit(tmp_path, SMALL, threads=1) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        reader = kit.store.chunks
        assert reader is not None
        tier: Any = doors.tier_of(kit.store)
        real, order = tier.rewriting, []

        def rewriting(*args: Any) -> Any:
            made = real(*args)
            layer = made.go_on

            def go_on() -> bool:
                order.append("layer")
                if order.count("layer") == 1:
                    kit.store.start([Load(77, extent_name(5), ROWS, (10, 11, 12))])
                return bool(layer())

            made.go_on = go_on
            return made

        tier.rewriting = rewriting
        load = tier.read
        tier.read = lambda *args: (order.append("load"), load(*args))[1]
        rewrite = reader.rewrite(extent_name(5), lambda: np.tile(np.arange(ROWS, dtype=np.uint16)[::-1], (3, 1)))
        kit.settle()
        assert rewrite.written
        assert order[:2] == ["layer", "load"]
        assert order.count("layer") == 3


def test_a_damaged_file_that_is_to_be_rewritten_is_dropped(tmp_path: Path) -> None:
    with Kit(tmp_path, DIRECT) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        path = kit.file(5)
        data = bytearray(path.read_bytes())
        data[DIRECT.offset(ROWS, 1, VALUES, 1)] ^= 1
        path.write_bytes(data)
        reader = kit.store.chunks
        assert reader is not None
        rewrite = reader.rewrite(extent_name(5), lambda: np.tile(np.arange(ROWS, dtype=np.uint16)[::-1], (2, 1)))
        kit.settle()
        assert rewrite.ended
        assert not rewrite.written
        assert kit.store.stats().damage == 1
        assert list(path.parent.iterdir()) == []
        gone = reader.rewrite(extent_name(5), lambda: np.zeros((2, ROWS), np.uint16))
        kit.settle()
        assert gone.ended
        assert kit.store.stats().damage == 1


def test_what_was_read_is_let_go_of_at_once(tmp_path: Path) -> None:
    """Buffers of a reading that is over do not wait for a garbage collection."""
    with Kit(tmp_path, DIRECT) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        reader = kit.store.chunks
        assert reader is not None
        into = np.empty((1, DIRECT.chunk_bytes), np.uint8)
        alive = weakref.ref(into)
        gc.disable()
        try:
            reading = begun(reader, edition_of(reader), ChunkRead(1, VALUES, 1, 2, into))
            assert reading.wait(10)
            kit.settle()
            del into, reading
            assert alive() is None
        finally:
            gc.enable()


def test_a_damaged_chunk_takes_its_extent_along(tmp_path: Path) -> None:
    with Kit(tmp_path, DIRECT) as kit:
        kit.put(5, ROWS, (3, 4, 5))
        path = next(tmp_path.glob("*/extents/*/*.safetensors"))
        data = bytearray(path.read_bytes())
        data[DIRECT.offset(ROWS, 1, PROBES, 2)] ^= 1
        path.write_bytes(data)
        reader = kit.store.chunks
        assert reader is not None
        into = np.empty((3, DIRECT.probe_chunk_bytes), np.uint8)
        reading = begun(reader, edition_of(reader), ChunkRead(1, PROBES, 0, 3, into))
        assert not reading.wait(10)
        assert kit.store.stats().damage == 1
        assert not path.exists()
