"""The mover alone: order, priorities, the last thread, time-outs."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import BACKGROUND, DEMAND, PREFETCH, SAVE
from afterglow.store.moving import mover as mover_module
from afterglow.store.moving import task as task_module
from afterglow.store.moving.mover import MAX_REPLACEMENTS, Mover
from afterglow.store.moving.task import Abandoned, Task
from tests import doors
from tests.store.store_kit import rest
from tests.waiting import wait_for


class Bench:
    """A mover whose tasks wait for a gate of their own; `log` is the order in which they began."""

    def __init__(self, threads=2, timeout=30.0):
        self.reports = []
        self.mover = Mover(threads, timeout, lambda task, done, kind: self.reports.append((done, kind)))
        self.log = []
        self.gates = {}

    def add(self, name, priority=DEMAND, *, key=None, writes=False, gate=False, move=0, fails=None, ahead=False):
        began = threading.Event()
        self.gates[name] = threading.Event()

        def work(task):
            self.log.append(name)
            began.set()
            if gate:
                assert self.gates[name].wait(20)
            if fails is not None:
                raise fails
            return 10

        task = Task(key or name, priority, work, move=move, writes=writes, ahead=ahead)
        task.began = began
        self.mover.submit(task)
        return task

    def open(self, *names):
        for name in names:
            self.gates[name].set()


@pytest.fixture
def bench():
    made = []

    def make(**more):
        made.append(Bench(**more))
        return made[-1]

    yield make
    for one in made:
        one.open(*one.gates)
        one.mover.close(5)


def test_the_urgent_go_first_and_equals_in_order(bench):
    b = bench(threads=1)
    b.add("first", gate=True).began.wait(20)
    for name, priority in [("d", BACKGROUND), ("c", SAVE), ("b1", PREFETCH), ("a", DEMAND), ("b2", PREFETCH)]:
        b.add(name, priority, writes=priority >= SAVE)
    b.open("first")
    assert rest(b.mover, 20)
    assert b.log == ["first", "a", "b1", "b2", "c", "d"]


def test_writers_leave_a_thread_for_loads(bench):
    b = bench(threads=2)
    b.add("w1", SAVE, writes=True, gate=True).began.wait(20)
    b.add("w2", SAVE, writes=True, gate=True)
    load = b.add("load", PREFETCH)
    assert load.began.wait(20)
    assert "w2" not in b.log
    b.open("w1", "w2")
    assert rest(b.mover, 20)
    assert b.log[-1] == "w2"


def test_reads_ahead_leave_a_thread_too_until_they_are_urged(bench):
    b = bench(threads=2)
    b.add("guess", PREFETCH, ahead=True, gate=True).began.wait(20)
    more = b.add("more", PREFETCH, ahead=True, gate=True)
    b.add("write", SAVE, writes=True)
    for name in ("d1", "d2"):
        assert b.add(name).began.wait(20)
    assert b.log == ["guess", "d1", "d2"]
    b.mover.urge([more])
    assert more.began.wait(20)
    b.open("more")
    assert b.add("d3").began.wait(20)
    assert "write" not in b.log
    b.open("guess")
    assert rest(b.mover, 20)
    assert b.log == ["guess", "d1", "d2", "more", "d3", "write"]


def test_tasks_of_one_key_keep_their_order_and_lend_priority(bench):
    b = bench(threads=2)
    holders = [b.add("h1", gate=True), b.add("h2", gate=True)]
    assert all(h.began.wait(20) for h in holders)
    b.add("other", PREFETCH)
    b.add("drop", BACKGROUND, key="x", writes=True)
    b.add("store", SAVE, key="x", writes=True)
    b.add("load", DEMAND, key="x")
    b.open("h1")  # one thread does the rest
    wait_for(lambda: len(b.log) >= 6)
    assert b.log[2:] == ["drop", "store", "load", "other"]


def test_failures_are_reported_by_kind(bench):
    b = bench()
    b.add("damage", move=1, fails=DamageError("bad"))
    b.add("io", move=2, fails=StoreError("worse"))
    assert rest(b.mover, 20)
    found = {done.move: (done.ok, done.error, kind) for done, kind in b.reports}
    assert found == {1: (False, "bad", "damage"), 2: (False, "worse", "io")}


def test_an_unforeseen_exception_is_a_failed_move(bench, caplog):
    b = bench()
    b.add("bug", move=1, fails=ZeroDivisionError("oops"))
    assert rest(b.mover, 20)
    assert not b.reports[0][0].ok
    assert b.add("next", move=2).began.wait(20)


def test_housekeeping_is_not_reported(bench):
    b = bench()
    b.add("sweep", move=None)
    assert rest(b.mover, 20)
    assert b.reports == []


def test_layers_are_waited_for_one_by_one(bench):
    b = bench()
    step = threading.Semaphore(0)

    def work(task):
        for layer in range(3):
            assert step.acquire(timeout=10)
            task.advance(layer + 1)
        assert step.acquire(timeout=10)
        return 1

    task = Task("k", DEMAND, work, move=1, writes=False)
    b.mover.submit(task)
    assert not task.wait_layer(0, 0.02)
    for layer in range(3):
        step.release()
        assert task.wait_layer(layer, 5)
        assert not task.wait_layer(layer + 1, 0.01)
    step.release()
    assert rest(b.mover, 20)
    assert task.wait_layer(2, 0)


def test_a_hanging_call_is_given_up_and_its_memory_freed_later(bench):
    b = bench(threads=1, timeout=0.2)
    hung = b.add("hung", gate=True, move=1)
    queued = b.add("queued", move=2)
    assert not hung.wait_layer(0, 10)
    assert queued.began.wait(20)  # on a replacement thread
    wait_for(lambda: len(b.reports) >= 2)
    first = next(done for done, _ in b.reports if done.move == 1)
    assert not first.ok
    assert first.slots_busy
    assert b.mover.hung == 1
    assert not rest(b.mover, 0.05)
    b.open("hung")
    assert rest(b.mover, 20)
    again = [(done, kind) for done, kind in b.reports if done.move == 1][1:]
    assert [(done.ok, done.slots_busy, kind) for done, kind in again] == [(False, False, None)]
    assert b.mover.hung == 0


def test_progress_keeps_a_slow_call_alive(bench, monkeypatch):
    """By a clock that only the work moves on: however long the process stands still, a step takes a third of the time-out."""
    now = 1000.0
    clock = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: now)
    monkeypatch.setattr(mover_module, "time", clock)
    monkeypatch.setattr(task_module, "time", clock)
    b = bench(timeout=0.3)

    def slow(task):
        nonlocal now
        for layer in range(8):
            time.sleep(0.1)
            now += 0.1
            task.advance(layer)
        return 1

    b.mover.submit(Task("slow", DEMAND, slow, move=1, writes=False))
    assert rest(b.mover, 10)
    assert [done.ok for done, _ in b.reports] == [True]


def test_a_task_given_up_learns_it_at_its_next_step(bench):
    b = bench(timeout=0.1)
    seen = []
    given_up = threading.Event()

    def work(task):
        try:
            assert given_up.wait(20)
            task.advance(1)
        except Abandoned as error:
            seen.append(error)
            raise
        return 1

    b.mover.submit(Task("k", DEMAND, work, move=1, writes=True))
    wait_for(lambda: b.reports)
    given_up.set()
    wait_for(lambda: len(b.reports) >= 2)
    assert len(seen) == 1
    assert [done.slots_busy for done, _ in b.reports] == [True, False]


def test_with_every_thread_hung_the_disk_is_a_miss_until_one_returns(bench):
    b = bench(threads=1, timeout=0.1)
    most = 1 + MAX_REPLACEMENTS
    for n in range(most):
        b.add(f"hung{n}", gate=True, move=n)
    b.add("queued", move=98)
    wait_for(lambda: b.mover.hung >= most)
    wait_for(lambda: any(done.move == 98 for done, _ in b.reports))
    start = time.monotonic()
    late = b.add("late", move=99)
    assert not late.wait_layer(0, 60)
    assert time.monotonic() - start < 20  # refused, not waited for
    assert {done.move for done, kind in b.reports if kind == "refused"} == {98, 99}
    b.open(*(f"hung{n}" for n in range(most)))
    assert rest(b.mover, 20)
    assert b.add("well again", move=100).began.wait(20)


def test_closing_refuses_what_is_queued_and_lets_run_what_runs(bench):
    b = bench(threads=1)
    b.add("running", gate=True, move=1).began.wait(20)
    b.add("queued", move=2)
    closer = threading.Thread(target=b.mover.close, args=(5,))
    closer.start()
    wait_for(lambda: doors.is_closed(b.mover))
    b.open("running")
    closer.join(20)
    assert not closer.is_alive()
    b.add("late", move=3)
    assert {done.move: done.ok for done, _ in b.reports} == {1: True, 2: False, 3: False}
    assert "queued" not in b.log


def test_closing_does_not_wait_for_ever(bench):
    b = bench(threads=1)
    stuck = b.add("stuck", gate=True, move=1)
    stuck.began.wait(20)
    b.mover.close(0.05)
    assert b.mover.hung == 1
    assert not stuck.wait_layer(0, None)
    b.open("stuck")
