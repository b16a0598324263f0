"""Loads that may read only some layers ahead, and loads that become urgent: over real files, and in the mover alone."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from afterglow.plan.step import BACKGROUND, DEMAND, PREFETCH, Drop, Load, MoveDone, Store
from afterglow.store.extents.layout import KVLayout
from afterglow.store.moving import mover as mover_module
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.task import Task
from tests import doors
from tests.store.store_kit import Kit, contents, extent_name, patch_reads, record, rest
from tests.waiting import wait_for

LAYOUT = KVLayout(4, 2, 8, "F32")
ROWS, SOURCE, TARGET = 100, (0, 1), (10, 12)


@pytest.fixture
def kit(tmp_path):
    with Kit(tmp_path, LAYOUT, slots=32, threads=1) as kit:
        for number in (1, 2, 3):
            assert kit.put(number, ROWS, SOURCE).ok
        yield kit


class Reads:
    """Counts the bytes that are read past the page cache, and holds reads back while its gate is closed."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        self.gate = threading.Event()
        self.gate.set()
        self.there = threading.Semaphore(0)  # a read has come to the gate

        def held_back(real):
            def call(*args):
                self.there.release()
                assert self.gate.wait(20)
                moved = real(*args)
                self.bytes += moved
                return moved

            return call

        patch_reads(monkeypatch, held_back)


def load(kit, number, *, ahead=None, into=TARGET, priority=DEMAND):
    kit.moves += 1
    kit.store.start([Load(kit.moves, extent_name(number), ROWS, into, priority, ahead=ahead)])
    return kit.moves


def collect(kit, count):
    found = []

    def enough():
        found.extend(kit.store.finished())
        return len(found) >= count

    wait_for(enough)
    return found


# -------------------------------------------------------------------------------------------------- over files


@pytest.mark.parametrize("ahead", [-1, 0, 1, 2, 3])
def test_layers_beyond_the_read_buffer_come_after_the_release_only(kit, monkeypatch, ahead):
    arena = kit.store.arena
    wanted, before = contents(arena, SOURCE, ROWS), contents(arena, TARGET, ROWS)
    reads = Reads(monkeypatch)
    move = load(kit, 1, ahead=ahead)
    there = max(0, ahead)
    for layer in range(there):
        assert kit.store.wait_layer(move, layer, 20)
    # The only thread does other work meanwhile: the gated load holds none, and has read all that it may.
    other = load(kit, 2, into=(20, 21))
    assert collect(kit, 1)[0].move == other
    found = contents(arena, TARGET, ROWS)
    assert np.array_equal(found[:there], wanted[:there])
    assert np.array_equal(found[there:], before[there:])
    assert not kit.store.wait_layer(move, there, 0)
    assert not kit.store.at_rest()
    tensors = 2 * LAYOUT.tensor_bytes(ROWS)
    head = LAYOUT.head_bytes(ROWS)
    assert reads.bytes == LAYOUT.file_bytes(ROWS) + (head + there * tensors if there else 0)
    kit.store.release(move)
    assert kit.store.wait_layer(move, 3, 20)
    (done,) = kit.settle()
    assert (done.move, done.ok, done.bytes) == (move, True, head + 4 * tensors)
    assert np.array_equal(contents(arena, TARGET, ROWS), wanted)
    assert kit.store.stats().disk_reads == 2


@pytest.mark.parametrize("ahead", [4, 5, 99])
def test_a_buffer_for_all_layers_is_no_gate(kit, ahead):
    load(kit, 1, ahead=ahead)
    assert [done.ok for done in kit.settle()] == [True]


def test_a_release_while_the_first_layers_are_read(kit, monkeypatch):
    wanted = contents(kit.store.arena, SOURCE, ROWS)
    reads = Reads(monkeypatch)
    reads.gate.clear()
    move = load(kit, 1, ahead=1)
    assert reads.there.acquire(timeout=20)
    kit.store.release(move)
    kit.store.release(move)  # once more, and of an unknown move
    kit.store.release(12345)
    reads.gate.set()
    (done,) = kit.settle()
    assert (done.ok, done.bytes) == (True, LAYOUT.file_bytes(ROWS))
    assert np.array_equal(contents(kit.store.arena, TARGET, ROWS), wanted)
    kit.store.release(move)


def test_two_gated_loads_leave_both_threads_to_others(tmp_path):
    with Kit(tmp_path, LAYOUT, slots=32, threads=2) as kit:
        for number in (1, 2, 3):
            kit.put(number, ROWS, SOURCE)
        gated = [load(kit, 1, ahead=1, into=(10, 11)), load(kit, 2, ahead=0, into=(12, 13))]
        assert kit.store.wait_layer(gated[0], 0, 20)
        for _ in range(3):
            third = load(kit, 3, into=(14, 15))
            assert [done.move for done in collect(kit, 1)] == [third]
        for move in gated:
            kit.store.release(move)
        assert sorted(done.move for done in kit.settle() if done.ok) == gated


def test_closing_ends_a_gated_load(kit):
    moves = [load(kit, 1, ahead=2), load(kit, 2, ahead=0, into=(20, 21))]
    assert kit.store.wait_layer(moves[0], 1, 20)
    answers = []
    waiters = [
        threading.Thread(target=lambda m=move, layer=layer: answers.append(kit.store.wait_layer(m, layer, None)))
        for move, layer in zip(moves, (2, 0), strict=True)
    ]
    for waiter in waiters:
        waiter.start()
    kit.store.close()
    for waiter in waiters:
        waiter.join(20)
    assert answers == [False, False]
    assert sorted((done.move, done.ok, done.slots_busy) for done in kit.store.finished()) == [
        (move, False, False) for move in moves
    ]
    assert kit.store.stats().hung == 0
    assert kit.store.stats().errors == {"refused": 2}


def test_closing_while_a_load_comes_to_its_gate(kit, monkeypatch):
    reads = Reads(monkeypatch)
    reads.gate.clear()
    move = load(kit, 1, ahead=1)
    assert reads.there.acquire(timeout=20)
    closer = threading.Thread(target=kit.store.close)
    closer.start()
    wait_for(lambda: doors.is_closed(doors.mover_of(kit.store)))
    reads.gate.set()
    closer.join(20)
    assert not closer.is_alive()
    assert [(done.move, done.ok, done.slots_busy) for done in kit.store.finished()] == [(move, False, False)]
    assert not kit.store.wait_layer(move, 0, 0)


def test_no_time_out_runs_at_the_gate(tmp_path, monkeypatch):
    """Another load, begun later, is given up for want of progress; the gated one is not."""
    with Kit(tmp_path, LAYOUT, slots=32, threads=2) as kit:
        kit.put(1, ROWS, SOURCE)
        kit.put(2, ROWS, SOURCE)
        gated = load(kit, 1, ahead=1)
        assert kit.store.wait_layer(gated, 0, 20)
        wait_for(lambda: not doors.running_moves(doors.mover_of(kit.store)))
        reads = Reads(monkeypatch)
        reads.gate.clear()
        hung = load(kit, 2, into=(20, 21))
        assert reads.there.acquire(timeout=20)
        doors.give_up_what_runs(doors.mover_of(kit.store))
        assert collect(kit, 1) == [MoveDone(hung, False, error="time-out", slots_busy=True, why="timeout")]
        reads.gate.set()
        assert [done.move for done in collect(kit, 1)] == [hung]
        kit.store.release(gated)
        assert [(done.move, done.ok) for done in kit.settle()] == [(gated, True)]


def test_a_gated_load_is_given_up_when_it_hangs_behind_its_gate(tmp_path, monkeypatch):
    with Kit(tmp_path, LAYOUT, slots=32) as kit:
        kit.put(1, ROWS, SOURCE)
        move = load(kit, 1, ahead=2)
        assert kit.store.wait_layer(move, 1, 20)
        reads = Reads(monkeypatch)
        reads.gate.clear()
        kit.store.release(move)
        assert reads.there.acquire(timeout=20)
        doors.give_up_what_runs(doors.mover_of(kit.store))
        assert not kit.store.wait_layer(move, 2, 20)
        assert collect(kit, 1) == [MoveDone(move, False, error="time-out", slots_busy=True, why="timeout")]
        reads.gate.set()
        assert [(done.ok, done.slots_busy) for done in collect(kit, 1)] == [(False, False)]


def test_what_comes_after_a_gated_load_of_an_extent_waits_for_it(kit):
    gated = load(kit, 1, ahead=1)
    kit.store.start([Drop(90, extent_name(1))])
    other = load(kit, 2, into=(20, 21))
    assert [done.move for done in collect(kit, 1)] == [other]
    assert kit.file(1).exists()
    kit.store.release(gated)
    assert [(done.move, done.ok) for done in kit.settle()] == [(gated, True), (90, True)]
    assert not kit.file(1).exists()


def test_damage_behind_the_gate_is_found(kit):
    raw = bytearray(kit.file(1).read_bytes())
    raw[-1] ^= 1  # padding of the last layer's values is not read, the rows before it are
    raw[LAYOUT.offset(ROWS, 3, 1)] ^= 1
    kit.file(1).write_bytes(raw)
    move = load(kit, 1, ahead=3)
    assert kit.store.wait_layer(move, 2, 20)
    kit.store.release(move)
    (done,) = kit.settle()
    assert not done.ok
    assert kit.store.stats().errors == {"damage": 1}
    assert not kit.file(1).exists()


def test_time_at_the_gate_is_not_time_of_reading(monkeypatch):
    """By a clock that only the work and the test move on."""
    now = 0.0
    monkeypatch.setattr(mover_module, "time", SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic))
    reports = []
    mover = Mover(1, 30.0, lambda task, done, kind: reports.append(done))

    def work(task):
        nonlocal now
        now += 3.0
        if task.limit(2) < 2:
            task.advance(1)
            task.pause()
        return 10

    task = Task("key", DEMAND, work, move=7, writes=False, gate=1)
    mover.submit(task)
    assert task.wait_layer(0, 20)
    wait_for(lambda: not task.started)
    now += 1000.0
    mover.release(task)
    assert rest(mover, 20)
    mover.close(5)
    assert reports == [MoveDone(7, True, bytes=20, seconds=6.0)]


# -------------------------------------------------------------------------------------------------- urgency


def test_urged_loads_overtake(kit, monkeypatch):
    for number in (4, 5, 6):
        assert kit.put(number, ROWS, SOURCE).ok
    reads = Reads(monkeypatch)
    reads.gate.clear()
    first = load(kit, 1, into=(4, 5))
    assert reads.there.acquire(timeout=20)
    second, third, fourth = (load(kit, n, into=(2 * n + 2, 2 * n + 3), priority=PREFETCH) for n in (2, 3, 4))
    kit.store.urge([fourth, first, 12345])
    demanded = load(kit, 5, into=(20, 21))
    kit.store.urge([third, fourth])  # which are waited for together: the third shares the place of the fourth
    reads.gate.set()
    assert [done.move for done in kit.settle()] == [first, fourth, third, demanded, second]
    kit.store.urge([first, fourth])


def test_what_an_urged_load_waits_for_is_as_urgent(kit, monkeypatch):
    reads = Reads(monkeypatch)
    reads.gate.clear()
    first = load(kit, 1, into=(4, 5))
    assert reads.there.acquire(timeout=20)
    prefetch = load(kit, 2, into=(6, 7), priority=PREFETCH)
    kit.store.start([Store(90, record(9, ROWS), SOURCE)])
    behind = load(kit, 9, into=(8, 9), priority=PREFETCH)
    kit.store.urge([behind])
    reads.gate.set()
    assert [(done.move, done.ok) for done in kit.settle()] == [(n, True) for n in (first, 90, behind, prefetch)]


def test_urging_what_waits_at_its_gate_counts_when_it_opens(kit, monkeypatch):
    gated = load(kit, 1, ahead=1, priority=PREFETCH)
    assert kit.store.wait_layer(gated, 0, 20)
    reads = Reads(monkeypatch)
    reads.gate.clear()
    running = load(kit, 2, into=(4, 5))
    assert reads.there.acquire(timeout=20)
    prefetch = load(kit, 3, into=(6, 7), priority=PREFETCH)
    kit.store.urge([gated])
    kit.store.release(gated)
    reads.gate.set()
    assert [done.move for done in kit.settle()] == [running, gated, prefetch]


# -------------------------------------------------------------------------------------------------- the mover


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_releases_ends_every_task_once(seed):
    """Tasks of few keys, some gated; releases and urges from two threads while they run."""
    rng = random.Random(seed)
    reports, ended = [], []
    mover = Mover(rng.choice([1, 2, 3]), 30.0, lambda task, done, kind: reports.append(done))
    layers = 3

    def work_of(number):
        there = 0

        def work(task):
            nonlocal there
            while there < (stop := task.limit(layers)):
                there = stop
                task.advance(there)
            if there < layers:
                task.pause()
            else:
                ended.append((task.key, number))
            return 1

        return work

    tasks = []
    for number in range(150):
        gate, writes = rng.choice([None, None, 0, 1, 2]), rng.random() < 0.2
        key = f"k{rng.randrange(12)}"
        gate = None if writes else gate
        tasks.append(Task(key, rng.randrange(4), work_of(number), move=number, writes=writes, gate=gate))

    def interfere(order):
        for task in order:
            if rng.random() < 0.3:
                mover.urge([task])
            mover.release(task)

    threads = [threading.Thread(target=interfere, args=(rng.sample(tasks, len(tasks)),)) for _ in range(2)]
    for task in tasks[:75]:
        mover.submit(task)
    for thread in threads:
        thread.start()
    for task in tasks[75:]:
        mover.submit(task)
    for thread in threads:
        thread.join()
    for task in tasks:
        mover.release(task)
    assert rest(mover, 20)
    assert sorted(done.move for done in reports) == list(range(150))
    assert all(done.ok for done in reports)
    for key in {task.key for task in tasks}:
        numbers = [number for found, number in ended if found == key]
        assert numbers == sorted(numbers)
    mover.close(5)


def test_an_urged_task_is_not_run_again_at_its_gate():
    """Its first, less urgent entry in the queue is void once it has run, also while it waits."""
    mover = Mover(1, 30.0, lambda task, done, kind: None)
    gate, began, calls = threading.Event(), threading.Event(), []

    def hold(task):
        began.set()
        assert gate.wait(20)
        return 0

    def work(task):
        calls.append(task.limit(2))
        if calls[-1] < 2:
            task.advance(1)
            task.pause()
        return 0

    mover.submit(Task("holder", DEMAND, hold, move=None, writes=False))
    assert began.wait(20)
    task = Task("gated", PREFETCH, work, move=1, writes=False, gate=1)
    mover.submit(task)
    mover.urge([task])
    gate.set()
    assert task.wait_layer(0, 20)
    last = threading.Event()
    mover.submit(Task("last", BACKGROUND, lambda task: last.set() or 0, move=None, writes=False))
    assert last.wait(20)
    mover.release(task)
    assert rest(mover, 20)
    mover.close(5)
    assert calls == [1, 2]


def test_closing_refuses_gated_tasks_of_every_state():
    reports = []
    mover = Mover(2, 30.0, lambda task, done, kind: reports.append((done.move, done.ok, kind)))

    def work(task):
        if task.limit(2) < 2:
            task.advance(1)
            task.pause()
        return 1

    tasks = [Task(f"k{n % 3}", DEMAND, work, move=n, writes=False, gate=n % 2) for n in range(9)]
    for task in tasks:
        mover.submit(task)
    assert tasks[1].wait_layer(0, 20)
    mover.close(5)
    for task in tasks:
        mover.release(task)
        assert not task.wait_layer(1, 0)
    assert sorted(reports) == [(n, False, "refused") for n in range(9)]
    assert mover.pending() == 0
