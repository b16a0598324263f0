"""Copies from host slots to host slots, against a loop over single rows."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import StoreError
from afterglow.plan.step import PREFETCH, Copy, Load
from afterglow.store.moving.move_work import copy_rows
from tests import doors
from tests.store.store_kit import ALIGNED, ODD, Kit, arena_of, contents, extent_name

SLOTS = 40


@st.composite
def copies(draw):
    """(pieces, target slots, rows): sources may be consecutive, scattered, cut anywhere and used twice."""
    order = draw(st.permutations(range(SLOTS)))
    if draw(st.booleans()):  # long runs of consecutive slots, too
        shift = draw(st.integers(0, SLOTS - 1))
        order = [(slot + shift) % SLOTS for slot in range(SLOTS)]
    at = 0
    extents = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 5))
        extents.append(tuple(order[at : at + count]))
        at += count
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.sampled_from(extents))
        first = draw(st.integers(0, 64 * len(slots) - 1))
        pieces.append((slots, first, draw(st.integers(first + 1, 64 * len(slots)))))
    rows = sum(stop - first for _, first, stop in pieces)
    while ODD.blocks(rows) > SLOTS - at:
        pieces.pop()
        rows = sum(stop - first for _, first, stop in pieces)
    return tuple(pieces), tuple(order[at : at + ODD.blocks(rows)]), rows


def row_by_row(arena, pieces, slots, rows):
    """The arena as it should be afterwards."""
    after = arena.rows.copy()
    done = 0
    for own, first, stop in pieces:
        for row in range(first, stop):
            after[:, :, slots[done // 64], done % 64] = arena.rows[:, :, own[row // 64], row % 64]
            done += 1
    assert done == rows
    while done % 64:
        after[:, :, slots[done // 64], done % 64] = 0
        done += 1
    return after


@settings(max_examples=150, deadline=None)
@given(copies())
def test_a_copy_is_what_a_loop_over_rows_would_do(copy):
    pieces, slots, rows = copy
    arena = arena_of(ODD, SLOTS)
    wanted = row_by_row(arena, pieces, slots, rows)
    layers = []
    moved = copy_rows(arena, pieces, slots, rows, layers.append)
    assert np.array_equal(arena.rows, wanted)
    assert moved == rows * 2 * ODD.layers * ODD.row_bytes
    assert layers == [0, 1, 2, 3]


def test_consecutive_rows_move_together():
    """One assignment a layer for a thousand rows, whatever the number of slots."""
    written = []

    class Rows(np.ndarray):
        def __setitem__(self, where, value):
            written.append(where)
            super().__setitem__(where, value)

    arena = arena_of(ODD, SLOTS)
    arena.rows = arena.rows.view(Rows)
    copy_rows(arena, [(tuple(range(16)), 10, 1010)], tuple(range(20, 36)), 1000, lambda layers: None)
    assert len(written) == ODD.layers + 1  # and the blank rows at the end


@pytest.mark.parametrize(
    ("pieces", "slots", "rows"),
    [
        ([((0, 1), 0, 129)], (5, 6, 7), 129),
        ([((0, 1), -1, 10)], (5,), 11),
        ([((0, 1), 10, 10)], (5,), 0),
        ([((), 0, 1)], (5,), 1),
        ([((0,), 0, 64)], (5,), 63),
        ([((0,), 0, 64)], (5, 6), 64),
        ([((0,), 0, 64)], (), 64),
        ([], (), 0),
        ([((0,), 0, 64)], (SLOTS,), 64),
        ([((-1,), 0, 64)], (5,), 64),
        ([((0, 1), 0, 64)], (1,), 64),
        ([((0, 1), 0, 128)], (5, 5), 128),
    ],
)
def test_what_cannot_be_copied_is_refused_before_anything_is_written(pieces, slots, rows):
    arena = arena_of(ALIGNED, SLOTS)
    before = arena.view.copy()
    with pytest.raises(StoreError):
        copy_rows(arena, pieces, slots, rows, lambda layers: None)
    assert np.array_equal(arena.view, before)


def test_a_copy_is_a_move(tmp_path):
    with Kit(tmp_path) as kit:
        wanted = np.concatenate([contents(kit.store.arena, (1, 2), 70), contents(kit.store.arena, (9,), 50)], axis=2)
        kit.store.start([Copy(1, (((1, 2), 0, 70), ((9,), 0, 50)), (20, 30), 120)])
        assert kit.store.wait_layer(1, ALIGNED.layers - 1, 20)
        (done,) = kit.settle()
        assert (done.move, done.ok) == (1, True)
        assert done.bytes == 120 * 2 * ALIGNED.layers * ALIGNED.row_bytes
        assert done.seconds > 0
        assert np.array_equal(contents(kit.store.arena, (20, 30), 120), wanted)
        assert not kit.store.arena.rows[:, :, 30, 120 - 64 :].any()
        stats = kit.store.stats()
        assert (stats.host_copies, stats.host_copy_bytes) == (1, done.bytes)
        assert (stats.disk_reads, stats.disk_writes, stats.disk_drops) == (0, 0, 0)
        kit.moves = 1
        assert kit.put(4, 120, (20, 30)).ok  # the new extent goes to disk like any other
        assert kit.get(4, 120, (50, 51)).ok
        assert np.array_equal(contents(kit.store.arena, (50, 51), 120), wanted)


def test_a_copy_that_cannot_be_is_a_failed_move():
    with Kit(None) as kit:
        done = kit.move(Copy(1, (((1, 2), 0, 70),), (2, 3), 70))
        assert not done.ok
        assert "both read and written" in done.error
        assert not kit.store.wait_layer(1, 0)
        assert kit.move(Copy(2, (((1, 2), 0, 70),), (3, 4), 70)).ok
        assert kit.store.wait_layer(2, 0)
        assert kit.store.stats().host_copies == 1


def test_copies_stand_in_line_like_loads(tmp_path, monkeypatch):
    """With one thread that is busy, an urged copy goes before tasks queued earlier."""
    with Kit(tmp_path, threads=1) as kit:
        kit.put(1, 64, (0,))
        gate, there = threading.Event(), threading.Event()
        work = doors.tier_of(kit.store).read

        def read(*args):
            there.set()
            assert gate.wait(20)
            return work(*args)

        monkeypatch.setattr(doors.tier_of(kit.store), "read", read)

        kit.store.start([Load(100, extent_name(1), 64, (5,))])
        assert there.wait(20)
        kit.store.start([Copy(n, (((0,), 0, 64),), (10 + n,), 64, PREFETCH) for n in range(3)])
        kit.store.urge([2])
        gate.set()
        assert [done.move for done in kit.settle()] == [100, 2, 0, 1]
