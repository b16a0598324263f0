"""The store's face: moves in, completions out. It knows no positions, no models, no queue and no policy."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from afterglow.errors import DamageError, SlowError, StoreError
from afterglow.plan.step import (
    BACKGROUND,
    DEMAND,
    Completion,
    Copy,
    Drop,
    ExtentRecord,
    Load,
    Move,
    MoveDone,
    SaveDone,
    Store,
    Use,
)
from afterglow.store.catalog import Catalog, Shares
from afterglow.store.copying import copy_rows
from afterglow.store.disk import DiskTier
from afterglow.store.extent import Bytes, Head
from afterglow.store.files import kind_of
from afterglow.store.layout import KVLayout
from afterglow.store.mover import Mover
from afterglow.store.namespace import Namespace
from afterglow.store.parts import layers_at_once
from afterglow.store.reading import Reader
from afterglow.store.recovery import Opened, file_name, open_catalog
from afterglow.store.saver import WRITE_BUFFER, RowSaver
from afterglow.store.task import Abandoned, Task
from afterglow.store.throttle import ArtificiallySlowTier, Throttle
from afterglow.store.tier import Buffer, HostArena, Tier

log = logging.getLogger("afterglow.store")

_FAILED_KEPT: Final = 4096  # failed loads and copies that `wait_layer` still knows after they were collected


@dataclass(slots=True)
class StoreStats:
    """Counters since start, and levels: those from `queue` on. Seconds are time inside calls.

    `errors` counts by kind: damage (of extents, of catalog rows, a catalog that had to be rebuilt, a description, and
    whatever else was not what belongs there), missing, no_space, io, timeout, refused, catalog. What the start finds counts
    with it.
    """

    disk_reads: int = 0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    chunk_reads: int = 0  # calls, each of some chunks of one extent
    chunk_read_bytes: int = 0
    chunk_read_seconds: float = 0.0
    disk_writes: int = 0
    disk_write_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_drops: int = 0
    host_save_bytes: int = 0
    host_save_seconds: float = 0.0
    host_copies: int = 0
    host_copy_bytes: int = 0
    host_copy_seconds: float = 0.0
    save_waits: int = 0  # saves that waited for room in the write buffer
    save_wait_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    orphans_swept: int = 0
    catalog_rebuilds: int = 0
    notes_damaged: int = 0
    queue: int = 0
    hung: int = 0
    disk_bytes: int = 0  # of all extents
    catalog_bytes: int = 0
    direct_io: bool = False

    @property
    def damage(self) -> int:
        """Extents, rows and catalogs whose bytes were not what had been written."""
        return self.errors.get("damage", 0)


class KVStore:
    """Host slots in a buffer of the caller's, and a disk tier where a namespace is given.

    `notify` is called from the store's threads whenever a completion is added; it must be cheap and
    thread-safe. `read_timeout` (seconds) is how long a move may go without progress. `write_buffer` (bytes): while
    more than that waits to be saved, `save` and `save_block` wait. `throttle` makes the disk slow on purpose, for
    benchmarks and tests. `shares`: what the catalog may take besides its rows. Raises StoreError when the namespace cannot be read or written. The namespace is closed with
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
        shares: Shares | None = None,
    ) -> None:
        self.layout = layout
        self.arena = HostArena(layout, slots, buffer)
        self._notify = notify
        self._namespace = namespace
        self._finished: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._loads: dict[int, Task] = {}  # and copies, until their completion is collected
        self._failed: OrderedDict[int, None] = OrderedDict()
        self._rows: dict[str, int] = {}  # of every extent that is on disk
        self._records: list[ExtentRecord] = []
        self._tier: Tier | None = None
        self._catalog: Catalog | None = None
        opened: Opened | None = None
        if namespace is not None:
            disk = DiskTier(namespace.extents, layout, namespace.description.digest, remake=namespace.remake)
            opened = open_catalog(namespace.catalog, disk, shares)
            self._tier, self._catalog = disk, opened.catalog
            if throttle is not None:
                log.warning("the disk tier is made slow on purpose: %s", throttle)
                self._tier = ArtificiallySlowTier(disk, throttle)
            self._records = opened.records
            self._rows = {record.id: record.rows for record in opened.records}
            self._stats.disk_bytes = sum(record.file_bytes for record in opened.records)
            self._stats.catalog_rebuilds = opened.rebuilt
            strange = namespace.damaged + disk.strange
            found = {"damage": opened.damaged + opened.rebuilt + strange, "missing": opened.missing}
            self._stats.errors = {kind: number for kind, number in found.items() if number}
            self._stats.direct_io = disk.direct
        self._mover = Mover(threads, read_timeout, self._moved)
        self._saver = RowSaver(self.arena, self._saved, write_buffer)
        self.chunks: Reader | None = None  # reads parts of extents, where the layout has probe heads
        if self._tier is not None and layout.probe_heads:
            self.chunks = Reader(self._tier, self._mover, self._rows, self._lost_chunks, self._count_chunks)
        for extent in opened.orphans if opened is not None else ():
            self._mover.submit(Task(extent, BACKGROUND, self._sweeping(extent), move=None, writes=True))

    # -------------------------------------------------------------------------------------------- the disk

    def records(self) -> list[ExtentRecord]:
        """What was on disk at the start, least recently used first. The list is handed over: a second call
        gets none, so that the tokens are not kept twice.
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

    def _task(self, move: Move) -> Task:
        number, priority = move.move, move.priority
        if isinstance(move, Load):
            gate = None if move.ahead is None or move.ahead >= self.layout.layers else move.ahead
            work = self._loading(move)
            return Task(move.extent, priority, work, move=number, writes=False, gate=gate, label="load")
        if isinstance(move, Copy):  # no order holds between copies
            return Task(f"copy {number}", priority, self._copying(move), move=number, writes=False, label="copy")
        if isinstance(move, Store):
            return Task(move.record.id, priority, self._storing(move), move=number, writes=True, label="store")
        return Task(move.extent, priority, self._dropping(move), move=number, writes=True, label="drop")

    def release(self, move: int) -> None:
        """Let a Load that was to read only some layers ahead read them all. No effect on any other move.

        Until then it holds no thread, and no time-out runs; the store is not `at_rest`, `close` fails it.
        """
        task = self._loads.get(move)
        if task is not None:
            self._mover.release(task)

    def urge(self, moves: Sequence[int]) -> None:
        """Give loads and copies of these numbers the priority DEMAND: somebody waits for them, layer by layer, now.

        No effect on what has ended or is unknown.
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
        if self._catalog is not None:
            self._catalog.touch([use for use in uses if use.extent in self._rows])

    def note(self, kind: str, items: Sequence[tuple[str, str | None]]) -> None:
        """Keep (key, value) pairs of a kind over restarts, None deleting one; written within seconds, in one
        transaction. Of each kind the 65,536 that were written last are kept. Without a disk tier nothing is.
        """
        if self._catalog is not None:
            self._catalog.note(kind, items)

    def write_notes(self, within: float = 30.0) -> None:
        """Write the notes that wait now, and not within seconds; waits for it, at most so many seconds. Raises StoreError."""
        if self._catalog is not None:
            self._catalog.write_notes(within)

    def notes(self, kind: str) -> dict[str, str]:
        """The notes of a kind as they were at the start, last written last; damaged ones are left out.

        They may be gone although the extents are not (a rebuilt catalog). They are handed over: a second call gets
        none.
        """
        return {} if self._catalog is None else self._catalog.notes(kind)

    # ----------------------------------------------------------------------------------------------- the host

    def save(
        self,
        draft: int,
        layer: int,
        slots: Sequence[int],
        first_row: int,
        keys: Bytes,
        values: Bytes,
    ) -> None:
        """Copy one layer's rows into a draft's slots: rows [first_row, first_row + len(keys)) of the draft.

        `keys` and `values` are uint8 [rows, row_bytes] and belong to the store until copied. `slots` are the
        draft's, from its first row on. One SaveDone follows the last layer. Waits while the write buffer is full.
        """
        self._saver.save(draft, layer, slots, first_row, keys, values)

    def save_block(self, draft: int, slots: Sequence[int], first_row: int, block: Bytes) -> None:
        """The same for all layers at once: `block` is uint8 [layers, 2, rows, row_bytes]."""
        self._saver.save_block(draft, slots, first_row, block)

    # ------------------------------------------------------------------------------------------ completions

    def finished(self) -> list[Completion]:
        """The completions since the last call, in order."""
        done: list[Completion] = []
        while self._finished:
            completion = self._finished.popleft()
            done.append(completion)
            load = self._loads.pop(completion.move, None) if isinstance(completion, MoveDone) else None
            if isinstance(completion, MoveDone) and load is not None and not completion.ok:
                self._failed[completion.move] = None
                if len(self._failed) > _FAILED_KEPT:
                    self._failed.popitem(last=False)
        return done

    def at_rest(self) -> bool:
        """Nothing is queued, runs, or waits to be collected."""
        return not (self._mover.pending() or self._saver.pending() or self._finished)

    def close(self, timeout: float = 10.0) -> None:
        """End the threads; queued moves fail, rows that were brought are saved. The buffer must live on while `stats().hung` is not 0."""
        self._saver.close()
        self._mover.close(timeout)
        if self._catalog is not None:
            self._catalog.close(timeout)
        if self._namespace is not None:
            self._namespace.close()

    def stats(self) -> StoreStats:
        """A copy of the counters, and the levels as they are now."""
        with self._lock:
            stats = replace(self._stats, errors=dict(self._stats.errors))
        stats.queue = self._mover.pending() + self._saver.pending()
        stats.hung = self._mover.hung
        stats.save_waits, stats.save_wait_seconds = self._saver.waits, self._saver.wait_seconds
        if self._catalog is not None:
            stats.catalog_bytes = self._catalog.bytes
            stats.notes_damaged = self._catalog.notes_damaged
            if self._catalog.failures:
                stats.errors["catalog"] = self._catalog.failures
        return stats

    # ---------------------------------------------------------------------------------- inside the threads

    def _loading(self, move: Load) -> Callable[[Task], int]:
        """In parts: after each the thread may go to another load that has come less far."""
        layers, there = self.layout.layers, 0  # how many have been read
        heads: dict[str, Head] = {}
        most = move.most_s if move.most_s is not None else math.inf

        def progress(task: Task, began: float, done: int) -> None:
            task.advance(done)
            seconds = task.seconds + time.perf_counter() - began
            if seconds > most and done < layers and task.priority != DEMAND:
                task.bytes = self.layout.file_bytes(move.rows) * done // layers
                raise SlowError(f"{done} of {layers} layers in {seconds:.3f} s")

        def work(task: Task) -> int:
            nonlocal there
            advance = partial(progress, task, time.perf_counter())
            rows = self._rows.get(move.extent)
            if self._tier is None or rows is None:
                raise StoreError(f"extent {move.extent[:16]} is not on disk") from FileNotFoundError(2, "missing")
            moved = 0
            try:
                while there < (limit := task.limit(layers)):
                    count = layers_at_once(self.layout, len(move.slots), self._mover.crowded(task))
                    stop = min(limit, there + count)
                    moved += self._tier.read(move.extent, rows, self.arena, move.slots, advance, there, stop, heads)
                    there = stop
                    advance(there)
                    if there < limit and self._mover.overtaken(task):
                        break
                if there < layers:
                    task.pause()
                return moved
            except (Abandoned, SlowError):
                raise
            except StoreError as error:
                self._drop_lost(move.extent, error)
                raise

        return work

    def _drop_lost(self, extent: str, error: StoreError) -> None:
        """What can never be read again goes: the room it takes is worth more than the evidence. An I/O error may pass:
        whether it has, the plan finds out later.
        """
        if isinstance(error, DamageError) or kind_of(error) == "missing":
            log.warning("dropped from the cache: %s", error)
            with contextlib.suppress(StoreError):
                self._remove(extent)

    def _lost_chunks(self, extent: str, error: StoreError) -> None:
        self._drop_lost(extent, error)
        self._count_chunks(kind_of(error), 0, 0.0)

    def _count_chunks(self, kind: str | None, moved: int, seconds: float) -> None:
        with self._lock:
            if kind is not None:
                self._stats.errors[kind] = self._stats.errors.get(kind, 0) + 1
                return
            self._stats.chunk_reads += 1
            self._stats.chunk_read_bytes += moved
            self._stats.chunk_read_seconds += seconds

    def _copying(self, move: Copy) -> Callable[[Task], int]:
        def work(task: Task) -> int:
            return copy_rows(self.arena, move.pieces, move.slots, move.rows, task.advance)

        return work

    def _storing(self, move: Store) -> Callable[[Task], int]:
        def work(task: Task) -> int:
            if self._tier is None or self._catalog is None:
                raise StoreError("there is no disk tier")
            record = replace(move.record, file_bytes=self.layout.file_bytes(move.record.rows))
            written = self._tier.write(record, self.arena, move.slots, task.advance)
            try:
                self._catalog.add(record, file_name(record.id))
                task.advance()
            except StoreError:
                with contextlib.suppress(StoreError):
                    self._remove(record.id)
                raise
            with self._lock:
                if record.id not in self._rows:
                    self._stats.disk_bytes += record.file_bytes
                self._rows[record.id] = record.rows
            return written

        return work

    def _dropping(self, move: Drop) -> Callable[[Task], int]:
        def work(task: Task) -> int:
            self._remove(move.extent)
            return 0

        return work

    def _sweeping(self, extent: str) -> Callable[[Task], int]:
        def work(task: Task) -> int:
            # Stored again since the start, perhaps; the mover has kept the order.
            if self._tier is not None and extent not in self._rows:
                self._tier.delete(extent)
                with self._lock:
                    self._stats.orphans_swept += 1
            return 0

        return work

    def _remove(self, extent: str) -> None:
        """Row first, then file, so that a crash in between leaves an orphan and not a promise.

        Where the catalog fails the file goes all the same, for its room; the row goes at the next start.
        """
        with self._lock:
            rows = self._rows.pop(extent, None)
            if rows is not None:
                self._stats.disk_bytes -= self.layout.file_bytes(rows)
        if self._tier is not None and self._catalog is not None:
            try:
                self._catalog.remove([extent])
            finally:
                self._tier.delete(extent)

    def _moved(self, task: Task, done: MoveDone, kind: str | None) -> None:
        with self._lock:
            stats = self._stats
            if kind is not None and kind != "slow":
                stats.errors[kind] = stats.errors.get(kind, 0) + 1
            if not done.ok:
                pass
            elif task.label == "load":
                stats.disk_reads += 1
                stats.disk_read_bytes += done.bytes
                stats.disk_read_seconds += done.seconds
            elif task.label == "copy":
                stats.host_copies += 1
                stats.host_copy_bytes += done.bytes
                stats.host_copy_seconds += done.seconds
            elif task.label == "store":
                stats.disk_writes += 1
                stats.disk_write_bytes += done.bytes
                stats.disk_write_seconds += done.seconds
            else:
                stats.disk_drops += 1
        self._finished.append(done)
        self._notify()

    def _saved(self, done: SaveDone, moved: int, seconds: float) -> None:
        with self._lock:
            self._stats.host_save_bytes += moved
            self._stats.host_save_seconds += seconds
        self._finished.append(done)
        self._notify()
