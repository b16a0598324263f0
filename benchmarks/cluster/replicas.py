"""Engines in this process, each with folders of its own, over one shared store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar
from unittest.mock import patch

from afterglow.bench.timed_requests import Turn, asked
from afterglow.engine.engine import Engine
from afterglow.plan.step import Move, MoveDone, TransferDone
from afterglow.sim.executor import Executor
from afterglow.store.kvstore import KVStore
from afterglow.store.shared.objects import Listed, ObstoreObjects
from benchmarks.common.engines import engine_of

IDLE_S = 60.0  # that an engine has at most to store and publish what a turn has left


@contextlib.contextmanager
def replicas(
    count: int, model: str, store: Path | None, cache: dict[str, Any], **config: Any
) -> Iterator[list[Engine]]:
    """So many engines, over a folder as their store, or without one."""
    shared = {"shared": f"file://{store}"} if store is not None else {}
    with contextlib.ExitStack() as engines:
        yield [engines.enter_context(engine_of(model, cache=cache | shared, **config)) for _ in range(count)]


def turn(engine: Engine, prompt: list[int], max_tokens: int = 1, **more: Any) -> Turn:
    """A greedy turn; all that it leaves is stored, and published, when this returns."""
    done = asked(engine, prompt, max_tokens, **more)
    idle(engine)
    return done


def idle(engine: Engine) -> None:
    """Wait until nothing is to be stored or published."""
    engine.settle()
    shared = engine.parts.store.shared
    if shared is not None and not shared.rest(IDLE_S):
        raise TimeoutError(f"an engine still publishes after {IDLE_S:.0f} s")


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Moves of engines, real and simulated, end before their next step meanwhile, in the order in which they were planned, and what these
    leave is published before other moves begin. No time goes by meanwhile, no lookup ends early, and no two objects are as old. Otherwise it is
    the machine that chooses between what is merged, evicted and published before what, and what is found differs from run to run.
    """
    finished, start, take, clock = KVStore.finished, KVStore.start, Executor.take, StoppedClock()

    def all_finished(store: KVStore) -> list[TransferDone]:
        clock.wait_for(lambda: not store.moves)
        return sorted(finished(store), key=_planned)

    def start_alone(store: KVStore, moves: Sequence[Move]) -> None:
        if moves and store.shared is not None:
            clock.wait_for(partial(store.shared.rest, 0.0))
        start(store, moves)

    def take_in_order(executor: Executor, now: float) -> list[TransferDone]:
        return sorted(take(executor, now), key=_planned)

    ordered = type("OrderedObjects", (OrderedObjects,), {"written": {}})
    with (
        patch.object(KVStore, "finished", all_finished),
        patch.object(KVStore, "start", start_alone),
        patch.object(Executor, "take", take_in_order),
        patch("afterglow.engine.setup._steady_clock", lambda: clock),
        patient(),
        patch("afterglow.store.shared.objects.ObstoreObjects", ordered),
    ):
        yield


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Lookups wait for their store, and for its directory, as long as it takes meanwhile: a machine that pauses must not end as one without
    them.
    """
    with (
        patch("afterglow.store.shared.shared_store.LOOKUP_S", IDLE_S),
        patch("afterglow.store.shared.directory.CALL_S", IDLE_S / 2),
        patch("afterglow.store.shared.directory.LATE_S", IDLE_S),
    ):
        yield


class StoppedClock:
    """Seconds since 1970, which stand still while moves are waited for: a plan that waits for slots gives that up when computing would have
    been over, and so learned how fast the disk is. Engines take turns, so that one clock does for all.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._last = 0.0

    def __call__(self) -> float:
        self._last = max(self._last, self._offset + time.monotonic())  # another engine may look while one waits
        return self._last

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until something is done, which moves are doing."""
        began = time.monotonic()
        while not done():
            if time.monotonic() > began + IDLE_S:
                raise TimeoutError(f"an engine still moves rows after {IDLE_S:.0f} s")
            time.sleep(0.0002)
        self._offset -= time.monotonic() - began


def _planned(done: TransferDone) -> int:
    """The number of a move; rows that were saved have none, and go first."""
    return done.move if isinstance(done, MoveDone) else -1


class OrderedObjects(ObstoreObjects):
    """A store whose objects are as old as the order says in which they were written: a folder's clock may be too coarse for that."""

    written: ClassVar[dict[str, float]] = {}  # by path

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        new = super().put(path, data, replace=replace)
        if new or replace:
            self.written[path] = max(time.time(), max(self.written.values(), default=0.0) + 1e-4)
        return new

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        for some in super().list(prefix):
            yield [each._replace(modified=self.written[each.path]) for each in some]


class SlowObjects(ObstoreObjects):
    """A store whose bytes arrive no faster than over a line of `rate` bytes/s, those of all readers one after another."""

    rate = 1e12
    _lock = Lock()
    _free_at = 0.0

    def get(self, path: str, start: int, length: int) -> bytes:
        """Read as usual, and wait until the line has carried the bytes."""
        asked_at = time.perf_counter()
        data = super().get(path, start, length)
        with SlowObjects._lock:
            SlowObjects._free_at = there = max(SlowObjects._free_at, asked_at) + len(data) / self.rate
        while (left := there - time.perf_counter()) > 0:
            time.sleep(left)
        return data


@contextlib.contextmanager
def slow_store(rate: float) -> Iterator[None]:
    """Engines made meanwhile read their store at so many bytes/s, all together."""
    made: Callable[..., object] = type("SlowObjects", (SlowObjects,), {"rate": rate})
    with patch("afterglow.store.shared.objects.ObstoreObjects", made):
        yield
