"""Counters that several threads keep: their base, and a store's."""

from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from afterglow.plan.step import MoveDone
from afterglow.store.moving.task import Task

S = TypeVar("S")


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


class LockedCounters(Generic[S]):
    """Counters that several threads add to. Every method may be called from any thread."""

    def __init__(self, stats: S, failures: dict[str, int]) -> None:
        """Begin to count in `stats`. `failures`: the field of it that counts errors by kind."""
        self._stats = stats
        self._failures = failures
        self._lock = threading.Lock()

    def count(self, **more: float) -> None:
        """Add to counters by their names."""
        with self._lock:
            for name, value in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + value)

    def count_error(self, kind: str) -> None:
        """Count an error by its kind."""
        with self._lock:
            self._failures[kind] = self._failures.get(kind, 0) + 1

    def snapshot(self) -> S:
        """Copy the counters."""
        with self._lock:
            return deepcopy(self._stats)


class StoreCounters(LockedCounters[StoreStats]):
    """The counters of a store."""

    def moved(self, task: Task, done: MoveDone, kind: str | None) -> None:
        """Count a move that has ended. `kind`: the kind of its error."""
        if task.label == "fetch":  # the shared tier has counters of its own
            return
        if kind is not None and kind != "slow":
            self.count_error(kind)
        if done.ok and task.label == "load":
            self.count(disk_reads=1, disk_read_bytes=done.bytes, disk_read_seconds=done.seconds)
        elif done.ok and task.label == "copy":
            self.count(host_copies=1, host_copy_bytes=done.bytes, host_copy_seconds=done.seconds)
        elif done.ok and task.label == "store":
            self.count(disk_writes=1, disk_write_bytes=done.bytes, disk_write_seconds=done.seconds)
        elif done.ok:
            self.count(disk_drops=1)
