"""Loads that go on side by side, layer by layer: a job needs the first layer of all its extents before the second of any."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from afterglow.plan.step import BACKGROUND, DEMAND, PREFETCH, SAVE, Load, MoveDone, Store
from afterglow.store.extents.layout import KVLayout
from afterglow.store.moving import move_work
from afterglow.store.moving.move_work import layers_at_once
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.task import Task
from tests import doors
from tests.store.store_kit import Kit, contents, extent_name, patch_reads, record, rest

LAYOUT = KVLayout(4, 2, 8, "F32")
BENCH = KVLayout(12, 4, 64, "F32")
ROWS, SOURCE = 100, (0, 1)
EXTENTS = (1, 2, 3)


@pytest.mark.parametrize(
    ("layout", "blocks", "crowded", "layers"),
    [
        (BENCH, 1, True, 4),  # 128 KiB each: a third of the layers
        (BENCH, 4, True, 4),  # 512 KiB
        (BENCH, 8, True, 2),  # 1 MiB: two make up the most that is read at a time
        (BENCH, 16, True, 1),
        (KVLayout(80, 8, 128, "F32"), 16, True, 1),  # 8 MiB: one is more than that
        (BENCH, 16, False, 16),  # 32 MiB at a time where no request waits
        (KVLayout(80, 8, 128, "F32"), 16, False, 4),
        (KVLayout(80, 64, 128, "F32"), 16, False, 1),
        (KVLayout(32, 1, 8, "BF16"), 1, True, 128),  # 2 KiB: the whole extent is less than is worth a call
        (KVLayout(2, 4, 64, "F32"), 4, True, 1),
    ],
)
def test_how_much_is_read_at_a_time(layout, blocks, crowded, layers):
    assert layers_at_once(layout, blocks, crowded) == layers


class Reads:
    """The calls of a kit's tier, in order: (extent, first layer, stop). The n-th waits for `gates[n]`, if there is one."""

    def __init__(self, kit):
        self.calls = []
        self.came = threading.Semaphore(0)
        self.gates = {}
        self.held = {}  # gates for all calls of an extent
        lock = threading.Lock()
        self._numbers = {extent_name(number): number for number in range(20)}
        real = doors.tier_of(kit.store).read

        def read(read, layer_done, first=0, stop=None):
            extent = self._numbers[read.extent]
            with lock:
                number = len(self.calls)
                self.calls.append((extent, first, stop))
            self.came.release()
            for gate in (self.gates.get(number), self.held.get(extent)):
                assert gate is None or gate.wait(20)
            return real(read, layer_done, first, stop)

        doors.tier_of(kit.store).read = read

    def hold(self, number):
        self.gates[number] = threading.Event()

    def hold_extent(self, extent):
        self.held[extent] = threading.Event()

    def let_go(self):
        for gate in (*self.gates.values(), *self.held.values()):
            gate.set()


@pytest.fixture
def one_layer_at_a_time(monkeypatch):
    monkeypatch.setattr(move_work, "MIN_READ_BYTES", 1)
    monkeypatch.setattr(move_work, "MIN_READS", 99)


@pytest.fixture
def kit(tmp_path, one_layer_at_a_time):
    with Kit(tmp_path, LAYOUT, slots=32, threads=1) as kit:
        for number in EXTENTS:
            assert kit.put(number, ROWS, (2 * number, 2 * number + 1)).ok
        kit.wanted = {n: contents(kit.store.arena, (2 * n, 2 * n + 1), ROWS) for n in EXTENTS}
        yield kit


def loads(kit, numbers=EXTENTS, priority=DEMAND, **more):
    """Load so many extents at once; the moves by number."""
    moves = {}
    for number in numbers:
        kit.moves += 1
        moves[number] = Load(kit.moves, extent_name(number), ROWS, slots_of(number), priority, **more)
    kit.store.start(list(moves.values()))
    return {number: move.move for number, move in moves.items()}


def slots_of(number):
    return (10 + 2 * number, 11 + 2 * number)


def check(kit, numbers=EXTENTS):
    for number in numbers:
        assert np.array_equal(contents(kit.store.arena, slots_of(number), ROWS), kit.wanted[number])


def side_by_side(*numbers):
    return [(number, layer, layer + 1) for layer in range(LAYOUT.layers) for number in numbers]


def test_loads_that_come_together_go_on_side_by_side(kit, monkeypatch):
    heads = []
    patch_reads(monkeypatch, lambda real: lambda fd, buffers, at: heads.append(at == 0) or real(fd, buffers, at))
    reads = Reads(kit)
    loads(kit)
    done = kit.settle()
    assert [d.ok for d in done] == [True] * 3
    assert reads.calls == side_by_side(*EXTENTS)
    assert [d.bytes for d in done] == [LAYOUT.file_bytes(ROWS)] * 3
    assert sum(heads) == 3  # heads are read once
    assert kit.store.stats().disk_reads == 3
    check(kit)


def test_layers_are_told_of_as_they_come(kit):
    reads = Reads(kit)
    reads.hold(3)  # the second layer of the first extent
    moves = loads(kit)
    for number in EXTENTS:
        assert kit.store.wait_layer(moves[number], 0, 20)
        assert not kit.store.wait_layer(moves[number], 1, 0)
    reads.let_go()
    assert all(done.ok for done in kit.settle())
    check(kit)


def test_two_threads_share_the_loads(tmp_path, one_layer_at_a_time):
    with Kit(tmp_path, LAYOUT, slots=32, threads=2) as kit:
        for number in EXTENTS:
            kit.put(number, ROWS, (2 * number, 2 * number + 1))
        kit.wanted = {n: contents(kit.store.arena, (2 * n, 2 * n + 1), ROWS) for n in EXTENTS}
        reads = Reads(kit)
        reads.hold_extent(EXTENTS[0])  # whichever thread is the first to read
        moves = loads(kit)
        for number in EXTENTS[1:]:  # a load that is held back does not hold back the others
            assert kit.store.wait_layer(moves[number], LAYOUT.layers - 1, 20)
        reads.let_go()
        assert all(done.ok for done in kit.settle())
        check(kit)


def test_prefetches_come_one_after_another(kit):
    """The next job's rows are wanted before those of the job after it."""
    reads = Reads(kit)
    loads(kit, priority=PREFETCH)
    kit.settle()
    assert reads.calls == [(n, 0, 4) for n in EXTENTS]


def test_prefetches_that_are_urged_together_go_on_side_by_side(kit):
    reads = Reads(kit)
    reads.hold(0)
    loads(kit, (1,))
    assert reads.came.acquire(timeout=20)  # the only thread is busy
    moves = loads(kit, (2, 3), priority=PREFETCH)
    kit.store.urge(list(moves.values()))
    reads.let_go()
    kit.settle()
    assert [call for call in reads.calls if call[0] != 1] == side_by_side(2, 3)
    check(kit)


def test_what_is_demanded_goes_before_the_rest_of_a_prefetch(kit, monkeypatch):
    monkeypatch.setattr(move_work, "MAX_ALONE_BYTES", 1)
    reads = Reads(kit)
    reads.hold(1)
    prefetch = loads(kit, (1,), priority=PREFETCH)[1]
    for _ in range(2):
        assert reads.came.acquire(timeout=20)
    demanded = loads(kit, (2,))[2]
    reads.let_go()
    assert [done.move for done in kit.settle()] == [demanded, prefetch]
    assert [number for number, *_ in reads.calls] == [1, 1, 2, 2, 2, 2, 1, 1]
    check(kit, (1, 2))


def test_a_later_job_waits_for_all_layers_of_an_earlier_one(kit):
    reads = Reads(kit)
    reads.hold(0)
    loads(kit, (1, 2))
    assert reads.came.acquire(timeout=20)
    loads(kit, (3,))
    reads.let_go()
    kit.settle()
    assert [number for number, *_ in reads.calls][-1] == 3
    assert all(first == 0 for number, first, _ in reads.calls if number == 3)
    check(kit)


@pytest.mark.parametrize("layer", range(4))
def test_damage_fails_its_own_load_only(kit, layer):
    raw = bytearray(kit.file(2).read_bytes())
    raw[LAYOUT.offset(ROWS, layer, 1)] ^= 1
    kit.file(2).write_bytes(raw)
    moves = loads(kit)
    done = {d.move: d.ok for d in kit.settle()}
    assert done == {moves[1]: True, moves[2]: False, moves[3]: True}
    assert not kit.file(2).exists()
    assert kit.store.stats().errors == {"damage": 1}
    check(kit, (1, 3))


def test_a_file_that_vanishes_between_two_parts_fails_its_own_load_only(kit):
    reads = Reads(kit)
    reads.hold(3)
    moves = loads(kit)
    assert kit.store.wait_layer(moves[3], 0, 20)
    kit.file(3).unlink()
    reads.let_go()
    done = {d.move: d.ok for d in kit.settle()}
    assert done == {moves[1]: True, moves[2]: True, moves[3]: False}
    assert kit.store.stats().errors == {"missing": 1}


def test_a_part_that_hangs_costs_its_own_load_only(tmp_path, one_layer_at_a_time):
    with Kit(tmp_path, LAYOUT, slots=32, threads=1) as kit:
        for number in EXTENTS:
            kit.put(number, ROWS, SOURCE)
        reads = Reads(kit)
        reads.hold(4)  # the second layer of the second extent
        moves = loads(kit)
        for _ in range(5):
            assert reads.came.acquire(timeout=20)
        doors.give_up_what_runs(doors.mover_of(kit.store))
        for number in (1, 3):
            assert kit.store.wait_layer(moves[number], LAYOUT.layers - 1, 20)
        assert not kit.store.wait_layer(moves[2], 1, 20)
        reads.let_go()
        done = kit.settle()
        assert sorted((d.move, d.ok) for d in done if d.move != moves[2]) == [(moves[1], True), (moves[3], True)]
        assert [(d.ok, d.slots_busy) for d in done if d.move == moves[2]] == [(False, True), (False, False)]


def test_closing_between_parts_ends_every_load_once(kit):
    reads = Reads(kit)
    reads.hold(4)
    moves = loads(kit)
    for _ in range(5):
        assert reads.came.acquire(timeout=20)
    closer = threading.Thread(target=kit.store.close)
    closer.start()
    while not doors.is_closed(doors.mover_of(kit.store)):
        time.sleep(0.001)
    reads.let_go()
    closer.join(20)
    assert not closer.is_alive()
    done = [d for d in kit.store.finished() if isinstance(d, MoveDone)]
    assert sorted(d.move for d in done) == sorted(moves.values())
    assert not any(d.slots_busy for d in done)


def test_a_store_behind_a_load_in_parts_waits_for_all_of_it(kit):
    reads = Reads(kit)
    kit.moves += 1
    again = Store(kit.moves, record(2, ROWS), (4, 5))
    reads.hold(0)
    moves = loads(kit)
    assert reads.came.acquire(timeout=20)
    kit.store.start([again])
    reads.let_go()
    order = [d.move for d in kit.settle()]
    assert order.index(moves[2]) < order.index(again.move)
    check(kit)


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_parts_ends_every_task_once(seed):
    """Tasks in parts, of few keys, some gated, submitted in groups and urged at random: all end, in their keys' order."""
    rng = random.Random(seed)
    layers, reports, ended = 5, [], []
    mover = Mover(rng.choice([1, 2, 3]), 30.0, lambda task, done, kind: reports.append(done))

    def work_of(number):
        there = 0

        def work(task):
            nonlocal there
            while there < (limit := task.limit(layers)):
                there = min(limit, there + (1 if mover.crowded(task) else 3))
                task.advance(there)
                if there < limit and mover.overtaken(task):
                    break
            if there < layers:
                task.pause()
            else:
                ended.append((task.key, number))
            return 1

        return work

    tasks = []
    for number in range(200):
        writes = rng.random() < 0.2
        gate = None if writes else rng.choice([None, None, 0, 2, 4])
        priority = rng.choice([DEMAND, DEMAND, PREFETCH, SAVE, BACKGROUND])
        key = f"k{rng.randrange(20)}"
        tasks.append(Task(key, priority, work_of(number), move=number, writes=writes, gate=gate))

    def interfere(order):
        for task in order:
            if rng.random() < 0.3:
                mover.urge(rng.sample(tasks, 3))
            mover.release(task)

    threads = [threading.Thread(target=interfere, args=(rng.sample(tasks, len(tasks)),)) for _ in range(2)]
    for first in range(0, 100, 4):
        mover.submit(*tasks[first : first + 4])
    for thread in threads:
        thread.start()
    for first in range(100, 200, 4):
        mover.submit(*tasks[first : first + 4])
    for thread in threads:
        thread.join()
    for task in tasks:
        mover.release(task)
    assert rest(mover, 20)
    assert sorted(done.move for done in reports) == list(range(200))
    assert all(done.ok for done in reports)
    for key in {task.key for task in tasks}:
        numbers = [number for found, number in ended if found == key]
        assert numbers == sorted(numbers)
    mover.close(5)
