"""The facade: moves in, completions out; saves; a restart."""

from __future__ import annotations

import itertools
import threading
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import ConfigError
from afterglow.plan.step import Drop, Load, SaveDone, Store, Use
from afterglow.store.extents.tier import HostArena, arena_bytes, runs
from tests.store.store_kit import ALIGNED, ODD, Kit, arena_of, contents, extent_name, record


def rows_of(layout, rows, seed=0):
    shape = (layout.layers, 2, rows, layout.row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


# ------------------------------------------------------------------------------------------------- the arena


def test_the_arena_is_layer_major():
    arena = arena_of(ALIGNED, 5)
    assert arena.aligned
    assert arena.plane(1, 0).shape == (5, ALIGNED.chunk_bytes)
    assert arena.plane(1, 0).flags.c_contiguous
    assert arena.plane(1, 0).base is not None
    assert not arena_of(ODD, 5).aligned
    assert arena_bytes(ALIGNED, 5) == arena.view.nbytes == 5 * ALIGNED.block_bytes


def test_buffers_that_cannot_be_an_arena():
    with pytest.raises(ConfigError, match="needs"):
        HostArena(ALIGNED, 2, bytearray(100))
    with pytest.raises(ConfigError, match="read-only"):
        HostArena(ALIGNED, 1, memoryview(bytes(arena_bytes(ALIGNED, 1))))
    assert HostArena(ALIGNED, 0, np.empty(0, np.uint8)).slots == 0


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40, unique=True))
def test_runs_cover_the_slots_in_order(slots):
    found = list(runs(slots))
    assert [slot for a, b in found for slot in range(a, b)] == slots
    assert all(b != a for (_, b), (a, _) in itertools.pairwise(found))


# ------------------------------------------------------------------------------------------------- the saves


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 200), rows=st.integers(1, 200), seed=st.integers(0, 99))
def test_saved_rows_lie_in_their_slots_and_nowhere_else(first, rows, seed):
    with Kit(None, ODD, slots=8) as kit:
        before = kit.store.arena.view.copy()
        slots = np.random.default_rng(seed).permutation(8)[: ODD.blocks(first + rows)].tolist()
        block = rows_of(ODD, rows, seed)
        for layer in range(ODD.layers):
            kit.store.save(3, layer, slots, first, block[layer, 0], block[layer, 1])
        assert kit.settle() == [SaveDone(3, first, rows)]
        whole = kit.store.arena.rows[:, :, slots].reshape(ODD.layers, 2, -1, ODD.row_bytes)
        assert np.array_equal(whole[:, :, first : first + rows], block)
        after = kit.store.arena.view.copy()
        kit.store.arena.view[:] = before
        kit.store.save_block(4, slots, first, block)
        kit.settle()
        assert np.array_equal(kit.store.arena.view, after)


def test_strided_rows_are_saved(tmp_path):
    with Kit(None) as kit:
        wide = np.random.default_rng(0).integers(0, 256, (10, 3 * ALIGNED.row_bytes), np.uint8)
        part = wide[:, ALIGNED.row_bytes : 2 * ALIGNED.row_bytes]
        for layer in range(ALIGNED.layers):
            kit.store.save(1, layer, (5,), 0, part, part)
        assert kit.settle() == [SaveDone(1, 0, 10)]
        assert np.array_equal(kit.store.arena.rows[1, 1, 5, :10], part)


def test_groups_of_one_draft_are_told_apart():
    with Kit(None) as kit:
        block = rows_of(ALIGNED, 4)
        for layer in range(ALIGNED.layers):
            for first in (0, 4):
                kit.store.save(1, layer, (5,), first, block[layer, 0], block[layer, 1])
        assert kit.settle() == [SaveDone(1, 0, 4), SaveDone(1, 4, 4)]


def test_a_save_that_cannot_be_is_reported_once(caplog):
    with Kit(None) as kit:
        wrong = np.zeros((4, 3), np.uint8)
        kit.store.save(1, 0, (5,), 0, wrong, wrong)
        good = rows_of(ALIGNED, 4)
        kit.store.save(1, 1, (5,), 0, good[1, 0], good[1, 1])
        assert kit.settle() == [SaveDone(1, 0, 4, ok=False)]
        kit.store.save_block(2, (), 0, good)
        assert kit.settle() == [SaveDone(2, 0, 4, ok=False)]


# ------------------------------------------------------------------------------------------------- the moves


def test_moves_end_with_completions_and_notices(tmp_path):
    with Kit(tmp_path) as kit:
        wanted = contents(kit.store.arena, (3, 4, 9), 150)
        stored = kit.put(1, 150, (3, 4, 9))
        assert stored.ok
        assert stored.bytes == ALIGNED.file_bytes(150)
        assert stored.seconds > 0
        loaded = kit.get(1, 150, (20, 30, 31))
        assert loaded.ok
        assert loaded.bytes == ALIGNED.file_bytes(150)
        assert np.array_equal(contents(kit.store.arena, (20, 30, 31), 150), wanted)
        assert kit.notified == 2
        assert kit.move(Drop(3, extent_name(1))).ok
        assert not kit.file(1).exists()
        assert not kit.get(1, 150, (20, 30, 31)).ok
        assert kit.move(Drop(4, extent_name(1))).ok  # once more does no harm
        stats = kit.store.stats()
        assert (stats.disk_reads, stats.disk_writes, stats.disk_drops) == (1, 1, 2)
        assert stats.disk_bytes == 0
        assert stats.errors == {"missing": 1}
        assert kit.store.at_rest()


def test_layers_can_be_waited_for(tmp_path):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        kit.store.start([Load(7, extent_name(1), 64, (1,))])
        for layer in range(ALIGNED.layers):
            assert kit.store.wait_layer(7, layer, 10)
        kit.settle()
        assert kit.store.wait_layer(7, 1)  # complete and collected
        kit.store.start([Load(8, extent_name(2), 64, (1,))])
        assert not kit.store.wait_layer(8, 0, 10)
        assert not kit.settle()[0].ok
        assert not kit.store.wait_layer(8, 0)  # failed and collected
        assert kit.store.wait_layer(12345, 0)


def test_moves_of_one_extent_keep_their_order(tmp_path):
    with Kit(tmp_path) as kit:
        kit.put(1, 64, (0,))
        for n in range(10, 60, 2):  # a drop has the lowest priority, and yet the store after it survives
            kit.store.start([Drop(n, extent_name(1)), Store(n + 1, record(1, 64), (0,))])
        assert all(done.ok for done in kit.settle())
        assert kit.get(1, 64, (1,)).ok


def test_without_a_disk_every_disk_move_fails_and_saves_work():
    with Kit(None) as kit:
        assert not kit.put(1, 64, (0,)).ok
        assert not kit.get(1, 64, (0,)).ok
        assert kit.move(Drop(9, extent_name(1))).ok
        assert kit.store.records() == []
        kit.store.touch([Use(extent_name(1), 1.0, 1, inf)])
        assert kit.store.stats().disk_bytes == 0


def test_many_moves_at_once_from_a_busy_caller(tmp_path):
    with Kit(tmp_path, slots=64) as kit:
        arena = kit.store.arena
        wanted = [contents(arena, (n,), 64) for n in range(32)]
        kit.store.start([Store(n, record(n, 64), (n,)) for n in range(32)])
        assert all(done.ok for done in kit.settle())
        kit.store.start([Load(100 + n, extent_name(n), 64, (32 + (n * 7) % 32,)) for n in range(32)])
        assert all(done.ok for done in kit.settle())
        for n in range(32):
            assert np.array_equal(contents(arena, (32 + (n * 7) % 32,), 64), wanted[n])
        assert kit.store.stats().disk_bytes == 32 * ALIGNED.file_bytes(64)


def test_a_restart_finds_everything(tmp_path):
    with Kit(tmp_path) as kit:
        wanted = contents(kit.store.arena, (3, 4), 100)
        kit.put(1, 100, (3, 4), parent="ab" * 32, parent_rows=64, salt="t", kind="session", last_used=5.0)
        kit.put(2, 64, (6,), last_used=3.0)
        kit.store.touch([Use(extent_name(1), 77.0, 1, inf), Use("unknown", 77.0, 1, inf)])
        kit.store.touch([Use(extent_name(1), 78.0, 2, inf)])
    with Kit(tmp_path) as kit:
        second, first = kit.store.records()
        assert kit.store.records() == []
        assert first.tokens == record(1, 100).tokens
        assert (first.last_used, first.hits, first.file_bytes) == (78.0, 2, ALIGNED.file_bytes(100))
        assert (first.parent, first.parent_rows, first.salt, first.kind) == ("ab" * 32, 64, "t", "session")
        assert second.id == extent_name(2)
        kit.store.arena.view[:] = 0
        assert kit.get(1, 100, (8, 9)).ok
        assert np.array_equal(contents(kit.store.arena, (8, 9), 100), wanted)
        assert kit.store.stats().catalog_rebuilds == 0


def test_a_bounce_buffer_makes_no_difference(tmp_path):
    with Kit(tmp_path, ODD, slots=64) as kit:
        wanted = contents(kit.store.arena, (3, 4, 9), 150)
        assert kit.put(1, 150, (3, 4, 9)).ok
        assert kit.get(1, 150, (20, 30, 31)).ok
        assert np.array_equal(contents(kit.store.arena, (20, 30, 31), 150), wanted)


def test_closing_ends_every_thread(tmp_path):
    before = set(threading.enumerate())
    kit = Kit(tmp_path)
    kit.put(1, 64, (0,))
    kit.store.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5)
    assert not [thread for thread in left if thread.is_alive()]
    kit.store.start([Load(50, extent_name(1), 64, (1,))])
    assert [done.ok for done in kit.store.finished()] == [False]
    kit.store.close()
