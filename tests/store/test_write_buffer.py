"""Back-pressure of the saver: a save waits for room; nothing is dropped, and no save waits for ever."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.plan.step import SaveDone
from afterglow.store.moving.saver import RowSaver, slot_runs
from tests import doors
from tests.store.store_kit import ODD, Kit, arena_of, rest
from tests.waiting import wait_for

ROWS = 4
SIZE = ODD.layers * 2 * ROWS * ODD.row_bytes  # bytes of one save of a block


class Bench:
    """A saver whose thread stops in its first report until `gate` is set: nothing leaves the buffer meanwhile."""

    def __init__(self, limit):
        self.arena = arena_of(ODD, 64)
        self.gate = threading.Event()
        self.reported = threading.Event()
        self.reports = []
        self.threads = []
        self.saver = RowSaver(self.arena, self._report, limit)

    def _report(self, done, moved, seconds):
        self.reports.append(done)
        self.reported.set()
        assert self.gate.wait(20)

    def block(self, draft, rows=ROWS):
        shape = (ODD.layers, 2, rows, ODD.row_bytes)
        return np.random.default_rng(draft).integers(0, 256, shape, np.uint8)

    def save(self, draft, rows=ROWS):
        self.saver.save_block(draft, (draft,), 0, self.block(draft, rows))

    def occupy(self):
        """Let the thread take a save and stop in it."""
        self.save(0)
        assert self.reported.wait(20)

    def save_blocked(self, draft, rows=ROWS):
        """A thread that is blocked in a save."""
        waits = self.saver.waits
        thread = threading.Thread(target=self.save, args=(draft, rows))
        self.threads.append(thread)
        thread.start()
        wait_for(lambda: self.saver.waits > waits)
        return thread

    def check(self, drafts, rows=ROWS):
        assert self.reports == [SaveDone(draft, 0, rows) for draft in drafts]
        for draft in drafts:
            assert np.array_equal(self.arena.rows[:, :, draft, :rows], self.block(draft, rows))


@pytest.fixture
def bench():
    made = []

    def make(limit):
        made.append(Bench(limit))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        one.saver.close()
        for thread in one.threads:
            thread.join(20)
            assert not thread.is_alive()


def test_a_save_waits_for_room_and_goes_on(bench):
    b = bench(2 * SIZE)
    b.occupy()
    b.save(1)  # rows that are being copied count until the copy is done
    assert b.saver.waits == 0
    thread = b.save_blocked(2)
    assert thread.is_alive()
    assert b.saver.pending() == 3
    assert not rest(b.saver, 0)
    b.gate.set()
    thread.join(20)
    assert rest(b.saver, 20)
    b.check([0, 1, 2])
    assert b.saver.waits == 1
    assert b.saver.wait_seconds > 0


def test_first_come_first_served(bench):
    """A small save does not slip past a large one that waits, nor does one that would fit."""
    b = bench(SIZE)
    b.occupy()
    for draft in (1, 2, 3, 4):
        b.save_blocked(draft)
    b.gate.set()
    assert rest(b.saver, 20)
    b.check([0, 1, 2, 3, 4])
    assert b.saver.waits == 4


@pytest.mark.parametrize("limit", [0, 1, SIZE - 1])
def test_what_is_larger_than_the_buffer_passes_alone(bench, limit):
    b = bench(limit)
    b.occupy()
    b.save_blocked(1)
    b.gate.set()
    assert rest(b.saver, 20)
    b.save(2)
    assert rest(b.saver, 20)
    b.check([0, 1, 2])


def test_closing_lets_in_whoever_waits(bench):
    b = bench(SIZE)
    b.occupy()
    waiting = [b.save_blocked(draft) for draft in (1, 2, 3)]
    closer = threading.Thread(target=b.saver.close)
    closer.start()
    for thread in waiting:  # they are let in at once: the thread is still busy with the first save
        thread.join(20)
        assert not thread.is_alive()
    assert len(b.reports) == 1
    b.gate.set()
    closer.join(20)
    assert not closer.is_alive()
    assert sorted(done.draft for done in b.reports) == [0, 1, 2, 3]
    for draft in range(4):
        assert np.array_equal(b.arena.rows[:, :, draft, :ROWS], b.block(draft))


def test_the_thread_does_not_end_while_a_caller_is_on_the_way_in(bench):
    """One in line has room and is about to wake up when the saver is closed."""
    b = bench(SIZE)
    b.gate.set()
    other = object()
    with doors.room_of(b.saver):
        doors.waiting_saves(b.saver).append(other)
    closer = threading.Thread(target=b.saver.close)
    closer.start()
    wait_for(lambda: doors.is_closed(b.saver))
    closer.join(0.1)
    assert closer.is_alive()
    b.save(1)
    assert b.reported.wait(20)
    b.check([1])
    with doors.room_of(b.saver):
        doors.waiting_saves(b.saver).remove(other)
        doors.room_of(b.saver).notify_all()
    closer.join(20)
    assert not closer.is_alive()


def test_a_save_after_the_end_is_answered_too(bench):
    b = bench(SIZE)
    b.gate.set()
    b.saver.close()
    b.saver.close()
    b.save(5)
    b.check([5])
    assert b.saver.pending() == 0


def test_an_interrupted_caller_leaves_the_line(bench, monkeypatch):
    b = bench(SIZE)
    b.occupy()
    condition = doors.room_of(b.saver)
    real = condition.wait_for

    def interrupted(predicate, timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return real(predicate, timeout)

    monkeypatch.setattr(condition, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        b.save(1)
    monkeypatch.undo()
    b.save_blocked(2)
    b.gate.set()
    assert rest(b.saver, 20)
    b.check([0, 2])


@pytest.mark.parametrize("limit", [1, 3 * SIZE, 10**9])
def test_many_callers_and_a_small_buffer_lose_nothing(limit):
    with Kit(None, ODD, slots=64, write_buffer=limit) as kit:
        block = {draft: Bench.block(None, draft) for draft in range(60)}

        def bring(drafts):
            for draft in drafts:
                if draft % 2:
                    kit.store.save_block(draft, (draft,), 0, block[draft])
                    continue
                for layer in range(ODD.layers):
                    kit.store.save(draft, layer, (draft,), 0, *block[draft][layer])

        callers = [threading.Thread(target=bring, args=(range(n, 60, 4),)) for n in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(20)
        done = kit.settle()
        assert sorted(one.draft for one in done) == list(range(60))
        assert all(one.ok for one in done)
        for draft in range(60):
            assert np.array_equal(kit.store.arena.rows[:, :, draft, :ROWS], block[draft])
        stats = kit.store.stats()
        assert stats.save_waits == 0 if limit == 10**9 else (stats.save_wait_seconds > 0) == (stats.save_waits > 0)


def test_a_closed_store_is_not_blocked_by_a_full_buffer():
    """The caller is blocked in `save` when the store is closed: both end, and the rows are saved."""
    gate, notified = threading.Event(), threading.Event()

    class SlowKit(Kit):
        def _notify(self):
            notified.set()
            assert gate.wait(20)

    with SlowKit(None, ODD, slots=64, write_buffer=1) as kit:
        kit.store.save_block(0, (0,), 0, Bench.block(None, 0))
        assert notified.wait(20)
        caller = threading.Thread(target=kit.store.save_block, args=(1, (1,), 0, Bench.block(None, 1)))
        caller.start()
        wait_for(lambda: kit.store.stats().save_waits == 1)
        closer = threading.Thread(target=kit.store.close)
        closer.start()
        caller.join(20)
        assert not caller.is_alive()
        gate.set()
        closer.join(20)
        assert not closer.is_alive()
        assert kit.store.finished() == [SaveDone(0, 0, ROWS), SaveDone(1, 0, ROWS)]


def test_the_buffer_takes_the_size_of_the_formula(bench):
    """100 rows of ODD take S bytes. At a rate that saves S in 1 s, a job that computes for 0.2 s behind its first layer leaves 0.8 S."""
    most = 1000 * SIZE
    b = bench(most)
    b.gate.set()
    size = 100 * SIZE // ROWS
    b.saver.expect(100, 0.4)
    assert b.saver.limit == most, "no rate is known yet"
    doors.copied(b.saver, size, 1.0)
    for computing, wanted in ((0.2, 0.8), (0.1, 0.9), (5.0, 2 / ODD.layers), (0.0, 1000 * SIZE / size)):
        b.saver.expect(100, computing)
        assert b.saver.limit == pytest.approx(wanted * size, abs=2), "at least two layers; all without a prediction"
    b.saver.expect(10**6, 0.001)
    assert b.saver.limit == most, "never more than it may be"


def test_a_buffer_that_becomes_larger_lets_a_save_in(bench):
    b = bench(10 * SIZE)
    doors.copied(b.saver, SIZE, 1.0)
    b.saver.expect(ROWS, 10.0)
    b.occupy()
    b.save_blocked(1)
    b.saver.expect(0, 0.0)
    wait_for(lambda: b.saver.pending() == 2)
    b.threads[0].join(20)
    assert not b.threads[0].is_alive(), "it is queued while the first one is still being reported"
    b.gate.set()
    assert rest(b.saver, 20)
    b.check([0, 1])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), st.data())
def test_runs_are_the_places_of_all_rows_and_as_few_as_slots_allow(slots, data):
    first = data.draw(st.integers(0, 64 * len(slots) - 1))
    rows = data.draw(st.integers(1, 64 * len(slots) - first))
    runs = slot_runs(slots, first, rows)
    places = [slots[row // 64] * 64 + row % 64 for row in range(first, first + rows)]
    assert [to + i for start, stop, to in runs for i in range(stop - start)] == places
    assert [row for start, stop, _ in runs for row in range(start, stop)] == list(range(rows))
    assert len(runs) == 1 + sum(b != a + 1 for a, b in itertools.pairwise(places))


def test_rows_that_came_by_themselves_are_reported_with_their_seconds():
    found = []
    saver = RowSaver(arena_of(ODD, 4), lambda *report: found.append(report))
    for _ in range(ODD.layers):
        saver.placed(7, 64, ROWS, 1, 0.5)
    assert found == [(SaveDone(7, 64, ROWS), SIZE, 0.5 * ODD.layers)]
    saver.lose(8, 0, ROWS, 1)
    saver.placed(8, 0, ROWS, ODD.layers - 1)
    assert found[1:] == [(SaveDone(8, 0, ROWS, False), 0, 0.0)]
    saver.close()
