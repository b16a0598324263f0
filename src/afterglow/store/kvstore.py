"""The store's face: moves in, completions out. It knows no positions, no models, no queue and no policy."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from afterglow.config import WRITE_BUFFER
from afterglow.plan.step import (
    BACKGROUND,
    Copy,
    ExtentRecord,
    Load,
    Move,
    MoveDone,
    SaveDone,
    Store,
    TransferDone,
    Use,
)
from afterglow.store.database.catalog import CatalogShares
from afterglow.store.database.recovery import open_catalog
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.throttle import ArtificiallySlowTier, Throttle
from afterglow.store.extents.tier import Buffer, HostArena, Tier
from afterglow.store.moving.move_work import LoadWork, copy_rows, drop_extent, store_extent, sweep_extent
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.reading import ChunkIO
from afterglow.store.moving.saver import RowSaver
from afterglow.store.moving.store_stats import StoreCounters, StoreStats
from afterglow.store.moving.stored_extents import StoredExtents
from afterglow.store.moving.task import Task
from afterglow.store.namespace.namespace import Namespace

if TYPE_CHECKING:  # not at the start of an engine that shares nothing
    from afterglow.store.shared.far_loads import FarLoad, FarLoads
    from afterglow.store.shared.shared_store import SharedStore

log = logging.getLogger("afterglow.store")

_FAILED_KEPT: Final = 4096  # failed loads and copies that `wait_layer` still knows after they were collected


class KVStore:
    """Host slots in a buffer of the caller's, and a disk tier where a namespace is given.

    `notify` is called from the store's threads whenever a completion is added; it must be cheap and
    thread-safe. `read_timeout` (seconds) is how long a move may go without progress. `write_buffer` (bytes): while
    more than that waits to be saved, `save` and `save_block` wait. `throttle` makes the disk slow on purpose, for
    benchmarks and tests. `shares`: what the catalog may take besides its rows. `windowed`: layers with a sliding
    window, in which a Load may `skip` blocks. `open_shared`: makes the tier that engines share, over the
    disk tier. Raises StoreError when the namespace cannot be read or written. The namespace is closed with
    the store.
    """

    def __init__(
        self,
        layout: KVLayout,
        slots: int,
        buffer: Buffer,
        *,
        namespace: Namespace | None,
        notify: Callable[[], None],
        threads: int = 2,
        read_timeout: float = 30.0,
        write_buffer: int = WRITE_BUFFER,
        throttle: Throttle | None = None,
        shares: CatalogShares | None = None,
        windowed: Collection[int] = (),
        open_shared: Callable[[DiskTier], SharedStore] | None = None,
    ) -> None:
        self.layout = layout
        self.arena = HostArena(layout, slots, buffer)
        self._notify = notify
        self._windowed = frozenset(windowed)
        self._namespace = namespace
        self._finished: deque[TransferDone] = deque()
        self._loads: dict[int, Task] = {}  # and copies, until their completion is collected
        self._failed: OrderedDict[int, None] = OrderedDict()
        self._records: list[ExtentRecord] = []
        self._disk: DiskTier | None = None
        self.on_disk = StoredExtents(layout, None, None)
        found, orphans = StoreStats(), []
        if namespace is not None:
            self._disk = disk = DiskTier(
                namespace.extents, layout, namespace.description.digest, remake=namespace.remake
            )
            opened = open_catalog(namespace.catalog, disk, shares)
            tier: Tier = disk
            if throttle is not None:
                if throttle != Throttle():
                    log.warning("the disk tier is made slow on purpose: %s", throttle)
                tier = ArtificiallySlowTier(disk, throttle)
            self.on_disk = StoredExtents(layout, tier, opened.catalog, opened.records)
            self._records, orphans = opened.records, opened.orphans
            damage = opened.damaged + opened.rebuilt + namespace.damaged + disk.strange
            errors = {"damage": damage, "missing": opened.missing}
            found.errors = {kind: number for kind, number in errors.items() if number}
            found.catalog_rebuilds, found.direct_io = opened.rebuilt, disk.direct
        self._counters = StoreCounters(found, found.errors)
        self._mover = Mover(threads, read_timeout, self._moved)
        self._saver = RowSaver(self.arena, self._saved, write_buffer)
        # New rows are the saver's to copy, or to count where they come to their slots by themselves.
        self.save, self.save_block = self._saver.save, self._saver.save_block
        self.placed, self.lose = self._saver.placed, self._saver.lose
        self.expect_saves = self._saver.expect
        self.shared: SharedStore | None = None
        self.far: FarLoads | None = None  # loads from the shared tier
        self._fetches: list[FarLoad] = []  # that have not begun
        if open_shared is not None and self._disk is not None:
            from afterglow.store.shared.far_loads import FarLoads

            self.shared = open_shared(self._disk)
            self.far = FarLoads(self.shared, self._disk, self.on_disk, self._mover)
        self.chunks: ChunkIO | None = None  # reads parts of extents, where the layout has probe heads
        if self._disk is not None and layout.probe_heads:
            self.chunks = ChunkIO(self.on_disk, self._mover, self._counters)
        for extent in orphans:
            work = partial(sweep_extent, extent, self.on_disk, partial(self._counters.count, orphans_swept=1))
            self._mover.submit(Task(extent, BACKGROUND, work, move=None, writes=True))

    # -------------------------------------------------------------------------------------------- the disk

    def records(self) -> list[ExtentRecord]:
        """Return the records of extents found on disk at the start, least recently used first.

        The list is handed over: a second call gets an empty one, so that the tokens are not kept twice.
        """
        records, self._records = self._records, []
        return records

    def start(self, moves: Sequence[Move]) -> None:
        """Queue moves; each ends with a MoveDone. Moves of one extent are carried out in order: behind a Load that
        waits for `release`, too. Loads of priority DEMAND bring their layers side by side.
        """
        tasks = [self._task(move) for move in moves]
        for move, task in zip(moves, tasks, strict=True):
            if isinstance(move, Load | Copy):
                self._loads[move.move] = task
        self._mover.submit(*tasks)
        for far in self._fetches:
            far.begin()
        self._fetches.clear()

    def _task(self, move: Move) -> Task:
        make = partial(Task, priority=move.priority, move=move.move)
        if isinstance(move, Load):
            gate = None if move.ahead is None or move.ahead >= self.layout.layers else move.ahead
            load = LoadWork(move, self.arena, self.on_disk, self._mover, self._windowed)
            task = make(move.extent, work=load.run, writes=False, gate=gate, label="load")
            if self.far is not None and (far := self.far.prepare(move, load, task)) is not None:
                self._fetches.append(far)
            return task
        if isinstance(move, Copy):  # no order holds between copies
            copying = partial(copy_rows, self.arena, move.pieces, move.slots, move.rows)
            return make(f"copy {move.move}", work=lambda task: copying(task.advance), writes=False, label="copy")
        if isinstance(move, Store):
            storing = partial(store_extent, move, self.arena, self.on_disk)
            return make(move.record.id, work=storing, writes=True, label="store")
        return make(move.extent, work=partial(drop_extent, move.extent, self.on_disk), writes=True, label="drop")

    def release(self, move: int) -> None:
        """Let a Load that was to read only some layers ahead read them all. No effect on any other move.

        Until then it holds no thread, and no time-out runs; the store is not `at_rest`, `close` fails it.
        """
        task = self._loads.get(move)
        if task is not None:
            self._mover.release(task)

    def urge(self, moves: Sequence[int]) -> None:
        """Give loads and copies of these numbers the priority DEMAND: a request waits for their layers now.

        No effect on moves that have ended or are unknown.
        """
        self._mover.urge([task for move in moves if (task := self._loads.get(move)) is not None])

    def wait_layer(self, move: int, layer: int, timeout: float | None = None) -> bool:
        """Wait (at most `timeout` seconds) until a Load or Copy has brought `layer`; False: it failed, or is late.

        One that is complete and collected is True at once, and so is a move that is neither.
        """
        task = self._loads.get(move)
        if task is None:
            return move not in self._failed
        return task.wait_layer(layer, timeout)

    def is_under_way(self, move: int) -> bool:
        """Has a Load or Copy been started and not ended?"""
        task = self._loads.get(move)
        return task is not None and not task.over

    def touch(self, uses: Sequence[Use]) -> None:
        """Note in the catalog how extents were used; written within seconds, in one transaction."""
        if self.on_disk.catalog is not None:
            self.on_disk.catalog.touch([use for use in uses if use.extent in self.on_disk])

    def note(self, kind: str, items: Sequence[tuple[str, str | None]]) -> None:
        """Keep (key, value) pairs of a kind over restarts, None deleting one; written within seconds, in one
        transaction. Of each kind the 65,536 that were written last are kept. Without a disk tier nothing is.
        """
        if self.on_disk.catalog is not None:
            self.on_disk.catalog.note(kind, items)

    def write_notes(self, within: float = 30.0) -> None:
        """Write the notes that wait now, and not within seconds; waits for it, at most so many seconds. Raises StoreError."""
        if self.on_disk.catalog is not None:
            self.on_disk.catalog.write_notes(within)

    def notes(self, kind: str) -> dict[str, str]:
        """The notes of a kind as they were at the start, last written last; damaged ones are left out.

        They may be gone although the extents are not (a rebuilt catalog). They are handed over: a second call gets
        none.
        """
        return {} if self.on_disk.catalog is None else self.on_disk.catalog.notes(kind)

    # ------------------------------------------------------------------------------------------ completions

    def finished(self) -> list[TransferDone]:
        """The completions since the last call, in order."""
        done: list[TransferDone] = []
        while self._finished:
            completion = self._finished.popleft()
            done.append(completion)
            load = self._loads.pop(completion.move, None) if isinstance(completion, MoveDone) else None
            if isinstance(completion, MoveDone) and load is not None and not completion.ok:
                self._failed[completion.move] = None
                if len(self._failed) > _FAILED_KEPT:
                    self._failed.popitem(last=False)
        return done

    @property
    def write_buffer(self) -> int:
        """Return how many bytes of new rows may wait to be saved."""
        return self._saver.limit

    def at_rest(self) -> bool:
        """Nothing is queued, runs, or waits to be collected."""
        return not (self.moves or self._finished)

    @property
    def moves(self) -> bool:
        """Is anything queued, or does it run?"""
        return bool(self._mover.pending() or self._saver.pending())

    def close(self, timeout: float = 10.0) -> None:
        """End the threads; queued moves fail, rows that were brought are saved. The buffer must live on while `stats().hung` is not 0."""
        if self.shared is not None:
            self.shared.close()
        self._saver.close()
        self._mover.close(timeout)
        if self._disk is not None and not self._mover.hung:
            self._disk.close()
        if self.on_disk.catalog is not None:
            self.on_disk.catalog.close(timeout)
        if self._namespace is not None:
            self._namespace.close()

    def stats(self) -> StoreStats:
        """A copy of the counters, and the levels as they are now."""
        stats = self._counters.snapshot()
        stats.disk_bytes = self.on_disk.bytes
        stats.queue = self._mover.pending() + self._saver.pending()
        stats.hung = self._mover.hung
        stats.write_buffer_bytes = self.write_buffer
        stats.save_waits, stats.save_wait_seconds = self._saver.waits, self._saver.wait_seconds
        if self.on_disk.catalog is not None:
            stats.catalog_bytes = self.on_disk.catalog.bytes
            stats.notes_damaged = self.on_disk.catalog.notes_damaged
            if self.on_disk.catalog.failures:
                stats.errors["catalog"] = self.on_disk.catalog.failures
        return stats

    # ---------------------------------------------------------------------------------- inside the threads

    def _moved(self, task: Task, done: MoveDone, kind: str | None) -> None:
        self._counters.moved(task, done, kind)
        self._finished.append(done)
        self._notify()

    def _saved(self, done: SaveDone, moved: int, seconds: float) -> None:
        self._counters.count(host_save_bytes=moved, host_save_seconds=seconds)
        self._finished.append(done)
        self._notify()
