"""A worker carries out all that it takes, in order, in its own thread, and ends."""

from __future__ import annotations

import threading
from collections import deque
from itertools import chain
from typing import Any

from afterglow.store.worker import Worker


class Recorder:
    """What a worker hands over: the batches, and the threads that it does so in."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.began, self.called = threading.Event(), threading.Semaphore(0)

    def __call__(self, items: deque[int]) -> None:
        self.began.set()
        assert self.gate.wait(30)
        self.threads.add(threading.get_ident())
        self.batches.append(list(items))
        items.clear()
        self.called.release()


def test_items_come_in_order_and_in_batches() -> None:
    seen = Recorder()
    seen.gate.clear()
    worker = Worker("test-worker", seen)
    assert worker.put(0)
    assert seen.began.wait(30)
    assert all(worker.put(n) for n in range(1, 100))
    seen.gate.set()
    worker.close()
    assert seen.batches[:2] == [[0], list(range(1, 100))]
    assert list(chain.from_iterable(seen.batches)) == list(range(100))
    assert len(seen.threads) == 1
    assert threading.get_ident() not in seen.threads


def test_many_threads_lose_nothing() -> None:
    seen = Recorder()
    worker = Worker("test-worker", seen)
    threads = [
        threading.Thread(target=lambda start=start: [worker.put(start + n) for n in range(200)]) for start in (0, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.close()
    found = list(chain.from_iterable(seen.batches))
    assert sorted(found) == [*range(200), *range(1000, 1200)]
    assert [n for n in found if n < 1000] == list(range(200))


def test_it_is_woken_without_items() -> None:
    seen = Recorder()
    worker = Worker[int]("test-worker", seen)
    worker.wake(0.0)
    assert seen.called.acquire(timeout=30)
    worker.wake(0.0)
    assert seen.called.acquire(timeout=30)
    assert seen.batches == [[], []]
    worker.close()


def test_a_later_wake_does_not_put_off_an_earlier_one() -> None:
    seen = Recorder()
    worker = Worker[int]("test-worker", seen)
    worker.wake(0.01)
    worker.wake(3600.0)
    assert seen.called.acquire(timeout=30)
    worker.close()


def test_closing_carries_out_what_is_queued_and_takes_nothing_more() -> None:
    seen, ended = Recorder(), []
    seen.gate.clear()
    worker = Worker("test-worker", seen, lambda: ended.append(list(seen.batches)))
    worker.put(1)
    assert seen.began.wait(30)
    worker.put(2)
    worker.close(timeout=0.01)
    assert not ended, "it hangs, and closing does not wait for ever"
    assert not worker.put(3)
    seen.gate.set()
    worker.close()
    worker.close()
    assert ended == [[[1], [2]]]


def test_nothing_of_a_done_item_lives_on() -> None:
    gone: list[Any] = []

    class Rows:
        def __del__(self) -> None:
            gone.append(threading.get_ident())

    done = threading.Event()

    def carry_out(items: deque[Rows]) -> None:
        while items:
            items.popleft()
        done.set()

    worker = Worker[Rows]("test-worker", carry_out)
    worker.put(Rows())
    assert done.wait(30)
    assert len(gone) == 1
    worker.close()
