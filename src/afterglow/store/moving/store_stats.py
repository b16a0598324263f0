"""Counters of a store, kept from several threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from afterglow.plan.step import MoveDone
from afterglow.store.moving.task import Task


@dataclass(slots=True)
class StoreStats:
    """Counters since start, and levels: those from `queue` on. Seconds are time inside calls.

    `errors` counts by kind: damage (of extents, of catalog rows, a catalog that had to be rebuilt, a description, and anything
    else that does not belong where it lies), missing, no_space, io, timeout, refused, catalog. Findings of the start count
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
    write_buffer_bytes: int = 0  # new rows that may wait to be saved
    disk_bytes: int = 0  # of all extents
    catalog_bytes: int = 0
    direct_io: bool = False

    @property
    def damage(self) -> int:
        """Count extents, rows and catalogs whose bytes were not those that had been written."""
        return self.errors.get("damage", 0)


class StoreCounters:
    """The counters of a store. Every method may be called from any thread."""

    def __init__(self, found: StoreStats) -> None:
        """Begin to count. `found`: the counts of the start."""
        self._stats = found
        self._lock = threading.Lock()

    def snapshot(self) -> StoreStats:
        """Copy the counters."""
        with self._lock:
            return replace(self._stats, errors=dict(self._stats.errors))

    def moved(self, task: Task, done: MoveDone, kind: str | None) -> None:
        """Count a move that has ended. `kind`: the kind of its error."""
        if task.label == "fetch":  # the shared tier has counters of its own
            return
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

    def saved(self, moved: int, seconds: float) -> None:
        """Count rows that were copied into host slots."""
        with self._lock:
            self._stats.host_save_bytes += moved
            self._stats.host_save_seconds += seconds

    def chunks_read(self, moved: int, seconds: float) -> None:
        """Count a call that has read chunks."""
        with self._lock:
            self._stats.chunk_reads += 1
            self._stats.chunk_read_bytes += moved
            self._stats.chunk_read_seconds += seconds

    def failed(self, kind: str) -> None:
        """Count an error of something that is no move."""
        with self._lock:
            self._stats.errors[kind] = self._stats.errors.get(kind, 0) + 1

    def swept(self) -> None:
        """Count an orphan that was removed."""
        with self._lock:
            self._stats.orphans_swept += 1
