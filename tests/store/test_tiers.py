"""One contract for all byte tiers: inherited by each implementation, which only says how to make and to harm
one.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import pytest

from afterglow.errors import DamageError, StoreError
from afterglow.store.extents import extent_reader, pieces
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import ExtentRead
from afterglow.store.faults import kind_of
from afterglow.store.moving.task import Abandoned
from tests.store.store_kit import (
    ALIGNED,
    DIGEST,
    EIGHT_BITS,
    ODD,
    arena_of,
    contents,
    extent_name,
    limit_reads,
    patch_reads,
    record,
)


def ignore(layers: int = 0) -> None:
    pass


class TierContract(ABC):
    """What every tier promises. `make` returns a tier; `raw` and `set_raw` reach its bytes behind its
    back.
    """

    layout: KVLayout = ALIGNED

    @abstractmethod
    def make(self, folder: Path): ...

    @abstractmethod
    def raw(self, tier, extent: str) -> bytes: ...

    @abstractmethod
    def set_raw(self, tier, extent: str, content: bytes) -> None: ...

    @pytest.fixture
    def tier(self, tmp_path):
        return self.make(tmp_path)

    @pytest.mark.parametrize("seed", range(25))
    def test_what_is_written_is_read(self, tier, seed):
        rows = int(np.random.default_rng(seed).integers(1, 401))
        arena = arena_of(self.layout, 20, seed)
        slots = np.random.default_rng(seed).permutation(20)
        count = self.layout.blocks(rows)
        source, target = slots[:count].tolist(), slots[count : 2 * count].tolist()
        wanted = contents(arena, source, rows)
        tier.write(record(seed, rows), arena, source, ignore)
        layers = []
        moved = tier.read(ExtentRead(extent_name(seed), rows, arena, target), layers.append)
        assert np.array_equal(contents(arena, target, rows), wanted)
        assert moved == self.layout.file_bytes(rows)
        assert layers == sorted(layers)
        assert layers[-1] == self.layout.layers

    def test_the_first_blocks_alone_can_be_read(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 400), arena, range(7), ignore)
        for count in (1, 3, 6):
            before = arena.view.copy()
            target = range(10, 10 + count)
            tier.read(ExtentRead(extent_name(1), 400, arena, target), ignore)
            found = contents(arena, target, 64 * count)
            assert np.array_equal(found, contents(arena, range(count), 64 * count))
            assert np.array_equal(arena.view[:, :, 10 + count :], before[:, :, 10 + count :])

    def test_layers_come_verified_and_in_order(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 128), arena, (0, 1), ignore)
        wanted = contents(arena, (0, 1), 128)

        def arrived(layers: int) -> None:
            assert np.array_equal(contents(arena, (4, 9), 128)[:layers], wanted[:layers])

        tier.read(ExtentRead(extent_name(1), 128, arena, (4, 9)), arrived)

    def test_stale_rows_behind_the_last_one_are_not_stored(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)
        assert not arena.rows[:, :, 3, 6:].any()

    def test_heads_and_lists(self, tier):
        arena = arena_of(self.layout, 20)
        assert list(tier.extents()) == []
        source = record(1, 70, parent="ef" * 32, parent_rows=128)
        tier.write(source, arena, (0, 1), ignore)
        tier.write(record(2, 5), arena, (5,), ignore)
        assert sorted(tier.extents()) == sorted([extent_name(1), extent_name(2)])
        found = tier.head(extent_name(1)).record
        assert (found.tokens, found.parent, found.parent_rows) == (source.tokens, "ef" * 32, 128)

    def test_writing_again_replaces(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 64), arena, (0,), ignore)
        tier.write(record(1, 64), arena, (1,), ignore)
        tier.read(ExtentRead(extent_name(1), 64, arena, (2,)), ignore)
        assert np.array_equal(arena.view[:, :, 2], arena.view[:, :, 1])
        assert len(list(tier.extents())) == 1

    def test_what_is_not_there(self, tier):
        arena = arena_of(self.layout, 20)
        with pytest.raises(StoreError) as caught:
            tier.read(ExtentRead(extent_name(1), 64, arena, (0,)), ignore)
        assert kind_of(caught.value) == "missing"
        with pytest.raises(StoreError):
            tier.head(extent_name(1))
        tier.delete(extent_name(1))
        tier.write(record(1, 64), arena, (0,), ignore)
        tier.delete(extent_name(1))
        assert list(tier.extents()) == []

    def test_slots_that_do_not_fit_the_rows_are_refused(self, tier):
        with pytest.raises(StoreError, match="slots"):
            tier.write(record(1, 65), arena_of(self.layout, 20), (0,), ignore)
        assert list(tier.extents()) == []

    def test_a_write_given_up_leaves_nothing(self, tier):
        calls = []

        def give_up() -> None:
            calls.append(1)
            raise Abandoned("enough")

        with pytest.raises(Abandoned):
            tier.write(record(1, 64), arena_of(self.layout, 20), (0,), give_up)
        assert calls == [1]
        assert list(tier.extents()) == []

    def test_every_damaged_byte_is_found(self, tier):
        """A byte in each 97: header, tokens, checksums, keys, values; no exception but DamageError."""
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        sound = self.raw(tier, extent_name(1))
        used, span = 2 * self.layout.chunk_bytes, self.layout.tensor_bytes(70)
        for position in range(0, len(sound), 97):
            damaged = bytearray(sound)
            damaged[position] ^= 0x10
            self.set_raw(tier, extent_name(1), bytes(damaged))
            behind_head = position - self.layout.head_bytes(70)
            if behind_head >= 0 and behind_head % span >= used:
                # a chunk of nothing but padding, which the read did not ask for
                tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)
                continue
            with pytest.raises(DamageError):
                tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)
        self.set_raw(tier, extent_name(1), sound)
        tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)

    def test_every_truncation_is_found(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        sound = self.raw(tier, extent_name(1))
        lengths = [0, 1, 7, 8, 100, 4095, 4097, len(sound) - 4096, len(sound) - 1]
        for length in [*lengths, *range(1000, len(sound), 1013)]:
            self.set_raw(tier, extent_name(1), sound[:length])
            with pytest.raises(DamageError):
                tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)
            with pytest.raises(DamageError):
                tier.head(extent_name(1))
        self.set_raw(tier, extent_name(1), sound + bytes(4096))
        with pytest.raises(DamageError):
            tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)


class TestDisk(TierContract):
    def make(self, folder):
        return DiskTier(folder / "extents", self.layout, DIGEST)

    def raw(self, tier, extent):
        return tier.path(extent).read_bytes()

    def set_raw(self, tier, extent, content):
        tier.path(extent).write_bytes(content)

    def test_an_extent_under_another_name_is_refused(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 64), arena, (0,), ignore)
        other = tier.path(extent_name(2))
        other.parent.mkdir(exist_ok=True)
        tier.path(extent_name(1)).rename(other)
        with pytest.raises(DamageError, match="another extent"):
            tier.read(ExtentRead(extent_name(2), 64, arena, (1,)), ignore)
        with pytest.raises(DamageError):
            tier.verify(extent_name(2))

    def test_another_model_s_extent_is_refused(self, tier, tmp_path):
        arena = arena_of(self.layout, 20)
        DiskTier(tmp_path / "extents", self.layout, "0" * 64).write(record(1, 64), arena, (0,), ignore)
        with pytest.raises(DamageError, match="another model"):
            tier.read(ExtentRead(extent_name(1), 64, arena, (1,)), ignore)

    def test_verify_reads_padding_too(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        tier.verify(extent_name(1))
        sound = self.raw(tier, extent_name(1))
        for position in range(0, len(sound), 211):
            damaged = bytearray(sound)
            damaged[position] ^= 1
            self.set_raw(tier, extent_name(1), bytes(damaged))
            with pytest.raises(DamageError):
                tier.verify(extent_name(1))

    def test_temporary_files_of_the_dead_are_removed(self, tier, tmp_path):
        folder = tmp_path / "extents" / "ab"
        folder.mkdir(parents=True)
        (folder / ".tmp-1-0").write_bytes(b"x")
        DiskTier(tmp_path / "extents", self.layout, DIGEST, inspect=True)
        assert (folder / ".tmp-1-0").exists()
        self.make(tmp_path)
        assert not (folder / ".tmp-1-0").exists()

    @pytest.mark.parametrize("after", range(4))
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
    def test_a_failing_write_leaves_nothing(self, tier, monkeypatch, number, after):
        real = {name: getattr(os, name) for name in ("pwritev", "rename", "open")}
        monkeypatch.setattr(pieces, "WRITE_BYTES", 1)  # a call per layer
        arena = arena_of(self.layout, 20)
        tier.write(record(9, 64), arena, (0,), ignore)
        calls = []

        def failing(name):
            def call(*args, **more):
                calls.append(name)
                if len(calls) > after:
                    raise OSError(number, os.strerror(number))
                return real[name](*args, **more)

            return call

        for name in real:
            monkeypatch.setattr(os, name, failing(name))
        try:
            with pytest.raises(StoreError) as caught:
                tier.write(record(1, 70), arena, (0, 1), ignore)
        finally:
            monkeypatch.undo()
        assert kind_of(caught.value) == ("no_space" if number == errno.ENOSPC else "io")
        assert list(tier.extents()) == [extent_name(9)]
        assert tier.folder.leftovers() == []

    def test_short_transfers_are_continued(self, tier, monkeypatch):
        """A kernel may move less than asked for; here never more than one page (or one byte, buffered)."""
        step = 4096 if tier.direct else 1000

        def short(call):
            def some(fd, buffers, offset):
                return call(fd, [np.asarray(buffers[0]).reshape(-1)[:step]], offset)

            return some

        arena = arena_of(self.layout, 20)
        wanted = contents(arena, (0, 1), 70)
        monkeypatch.setattr(os, "pwritev", short(os.pwritev))
        monkeypatch.setattr(os, "preadv", short(os.preadv))
        tier.write(record(1, 70), arena, (0, 1), ignore)
        tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore)
        assert np.array_equal(contents(arena, (2, 3), 70), wanted)


class TestDiskThroughABounceBuffer(TestDisk):
    layout = ODD


class TestDiskWithoutCompiledKernels(TestDisk):
    @pytest.fixture(autouse=True)
    def _without(self, monkeypatch):
        monkeypatch.setattr(extent_reader, "kernels", lambda: None)


class TestDiskOfRowsInEightBits(TestDisk):
    layout = EIGHT_BITS


class TestPartsOfADisk(TestDisk):
    """The contract of a tier that reads extents in parts."""

    layout = KVLayout(4, 2, 8, "F32")

    @pytest.mark.parametrize("joined", [1, 1 << 20])
    @pytest.mark.parametrize("count", [1, 3])
    def test_any_two_parts_make_the_whole(self, tier, monkeypatch, joined, count):
        limit_reads(monkeypatch, joined)
        arena, layers = arena_of(self.layout, 20), self.layout.layers
        tier.write(record(1, 150), arena, (0, 1, 2), ignore)
        wanted = contents(arena, range(count), min(150, 64 * count))
        whole = tier.read(ExtentRead(extent_name(1), 150, arena, range(5, 5 + count)), ignore)
        target = (12, 10, 15)[:count]
        for cut in range(1, layers):
            arena.view[:, :, target] = 7
            seen = []
            moved = tier.read(ExtentRead(extent_name(1), 150, arena, target), seen.append, 0, cut)
            found = contents(arena, target, wanted.shape[2])
            assert np.array_equal(found[:cut], wanted[:cut])
            assert (found[cut:] == 7).all()
            assert seen[-1] == cut
            moved += tier.read(ExtentRead(extent_name(1), 150, arena, target), seen.append, cut)
            assert moved == whole
            assert seen == sorted(seen)
            assert seen[-1] == layers
            assert np.array_equal(contents(arena, target, wanted.shape[2]), wanted)

    def test_a_part_verifies_the_head_and_its_own_chunks(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        sound = self.raw(tier, extent_name(1))
        in_layer = [self.layout.offset(70, layer, 1) for layer in range(self.layout.layers)]
        for position, found in [(300, True), (in_layer[0], False), (in_layer[1], True), (in_layer[3], False)]:
            damaged = bytearray(sound)
            damaged[position] ^= 1
            self.set_raw(tier, extent_name(1), bytes(damaged))
            if found:
                with pytest.raises(DamageError):
                    tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore, 1, 3)
            else:
                tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), ignore, 1, 3)
        self.set_raw(tier, extent_name(1), sound)
        with pytest.raises(DamageError, match="rows"):
            tier.read(ExtentRead(extent_name(1), 64, arena, (2,)), ignore, 1, 3)

    def test_a_part_of_what_is_not_there(self, tier):
        with pytest.raises(StoreError) as caught:
            tier.read(ExtentRead(extent_name(1), 64, arena_of(self.layout, 20), (0,)), ignore, 1, 2)
        assert kind_of(caught.value) == "missing"

    def test_a_part_that_cannot_be_read(self, tier, monkeypatch):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 64), arena, (0,), ignore)

        def fails(*_args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch_reads(monkeypatch, lambda _: fails)
        with pytest.raises(StoreError) as caught:
            tier.read(ExtentRead(extent_name(1), 64, arena, (1,)), ignore, 1, 2)
        assert kind_of(caught.value) == "io"


class TestPartsThroughABounceBuffer(TestPartsOfADisk):
    layout = KVLayout(4, 1, 6, "BF16")


class TestDiskPieceByPiece(TestPartsOfADisk):
    """Extents of several pieces: each is verified, or its checksums computed, while the next is on its way."""

    @pytest.fixture(autouse=True)
    def _small_pieces(self, monkeypatch):
        limit_reads(monkeypatch, 1)
        monkeypatch.setattr(pieces, "WRITE_BYTES", 1)

    @pytest.mark.parametrize(("part", "before"), [("head", []), (0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
    def test_what_comes_before_the_damage_arrives(self, tier, part, before):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        damaged = bytearray(self.raw(tier, extent_name(1)))
        damaged[300 if part == "head" else self.layout.offset(70, part, 1)] ^= 1
        self.set_raw(tier, extent_name(1), bytes(damaged))
        layers = []
        with pytest.raises(DamageError, match="checksum" if part == "head" else f"layer {part}, values, chunk 0"):
            tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), layers.append)
        assert layers == before

    @pytest.mark.parametrize("call", range(4))
    def test_a_read_that_fails_half_way(self, tier, monkeypatch, call):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        left = [call]

        def failing(real):
            def fails(*args):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(*args)

            return fails

        patch_reads(monkeypatch, failing)
        layers = []
        with pytest.raises(StoreError) as caught:
            tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), layers.append)
        assert kind_of(caught.value) == "io"
        verified_later = extent_reader.kernels() is None  # while the next piece is on its way
        assert layers == list(range(1, call + 1 - verified_later))[: self.layout.layers]

    def test_layers_come_in_the_thread_that_asked(self, tier):
        arena = arena_of(self.layout, 20)
        tier.write(record(1, 70), arena, (0, 1), ignore)
        threads = []
        tier.read(ExtentRead(extent_name(1), 70, arena, (2, 3)), lambda _: threads.append(threading.get_ident()))
        assert threads == [threading.get_ident()] * self.layout.layers

    def test_the_head_is_written_last(self, tier, monkeypatch):
        """It holds the checksums of all the rest."""
        real, offsets = os.pwritev, []
        monkeypatch.setattr(os, "pwritev", lambda *args: offsets.append(args[2]) or real(*args))
        tier.write(record(1, 70), arena_of(self.layout, 20), (0, 1), ignore)
        assert offsets == [*(self.layout.offset(70, layer, 0) for layer in (1, 2, 3)), 0]


class TestPiecesWithoutCompiledKernels(TestDiskPieceByPiece):
    @pytest.fixture(autouse=True)
    def _without(self, monkeypatch):
        monkeypatch.setattr(extent_reader, "kernels", lambda: None)


class TestDiskWithoutDirectIO(TestDisk):
    """As on a file system that refuses O_DIRECT."""

    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch):
        real = os.open

        def refusing(path, flags, *args, **more):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *args, **more)

        monkeypatch.setattr(os, "open", refusing)

    def test_it_knows(self, tier):
        assert not tier.direct


def test_the_compiled_kernels_open_files_by_one_call(tmp_path, monkeypatch):
    """Without Python's own looks at the folders and the file, which take as long as a third of a small extent's bytes."""
    if pieces.kernels() is None:
        pytest.skip("no compiled kernels")
    layout = KVLayout(8, 4, 16, "F32")
    tier = DiskTier(tmp_path, layout, DIGEST)
    arena = arena_of(layout, 8)
    tier.write(record(1, 64), arena, range(1), ignore)
    calls = []
    for name in ("lstat", "fstat", "open"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    tier.read(ExtentRead(extent_name(1), 64, arena, range(4, 5)), ignore)
    assert calls == []
    tier.path(extent_name(1)).write_bytes(b"short")  # what is wrong is looked at closer
    with pytest.raises(DamageError, match="5 bytes long instead of"):
        tier.read(ExtentRead(extent_name(1), 64, arena, range(4, 5)), ignore)
    assert calls == ["lstat", "lstat", "open", "fstat", "fstat"]


def test_reads_are_few_and_large(tmp_path, monkeypatch):
    """Small layers come together, and the head with the first layer."""
    layout = KVLayout(8, 4, 16, "F32")  # a layer of 256 rows is 128 KiB
    tier = DiskTier(tmp_path, layout, DIGEST)
    arena = arena_of(layout, 8)
    tier.write(record(1, 256), arena, range(4), ignore)
    calls = []
    patch_reads(monkeypatch, lambda real: lambda *args: calls.append(real(*args)) or calls[-1])
    layers = []
    tier.read(ExtentRead(extent_name(1), 256, arena, range(4, 8)), layers.append)
    assert len(calls) == 1
    assert calls[0] == layout.file_bytes(256)
    assert layers == [8]
    limit_reads(monkeypatch, 128 << 10)
    calls.clear()
    layers.clear()
    tier.read(ExtentRead(extent_name(1), 256, arena, range(4, 8)), layers.append)
    assert len(calls) == 8
    assert layers == [1, 2, 3, 4, 5, 6, 7, 8]


def checksum_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("afterglow-checksums")]


def test_the_thread_for_checksums_ends_with_the_tier(tmp_path):
    before = set(checksum_threads())
    tier = DiskTier(tmp_path, ALIGNED, DIGEST)
    tier.write(record(1, 256), arena_of(ALIGNED, 8), range(4), ignore)
    (thread,) = set(checksum_threads()) - before
    del tier
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_rows_in_eight_bits_come_by_the_compiled_kernels_too(tmp_path, monkeypatch):
    """Their tensors begin anywhere in a page."""
    if pieces.kernels() is None:
        pytest.skip("no compiled kernels")
    tier = DiskTier(tmp_path, EIGHT_BITS, DIGEST)
    arena = arena_of(EIGHT_BITS, 8)
    tier.write(record(1, 200), arena, range(4), ignore)
    wanted = contents(arena, range(4), 200)
    calls = []
    for module in (os, pieces):
        real = module.preadv
        monkeypatch.setattr(module, "preadv", lambda *args, m=module, r=real: calls.append(m.__name__) or r(*args))
    tier.read(ExtentRead(extent_name(1), 200, arena, (7, 5, 6, 4)), ignore)
    assert set(calls) == {pieces.__name__}
    assert np.array_equal(contents(arena, (7, 5, 6, 4), 200), wanted)
