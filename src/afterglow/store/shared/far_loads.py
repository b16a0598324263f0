"""Loads of extents that are in the shared tier: a fetch to a file, whose layers are read as they come.

The file becomes the disk tier's when all its layers have been read and verified. Until then it is a temporary one, and goes with
whatever fails.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial

from afterglow.errors import StoreError
from afterglow.plan.step import DEMAND, ExtentRecord, Load
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.moving.move_work import LoadWork
from afterglow.store.moving.mover import Mover
from afterglow.store.moving.stored_extents import StoredExtents
from afterglow.store.moving.task import Task
from afterglow.store.shared.fetcher import Fetch, FetchEnd
from afterglow.store.shared.shared_store import SharedStore


class FarLoads:
    """Knows which loads bring extents of the shared tier. The thread that owns the plan calls."""

    def __init__(self, shared: SharedStore, disk: DiskTier, stored: StoredExtents, mover: Mover) -> None:
        self.shared = shared
        self.disk = disk
        self.stored = stored
        self.mover = mover
        self._expected: dict[str, ExtentRecord] = {}

    def expect(self, record: ExtentRecord) -> None:
        """Note that the rows of an extent are in the shared tier: its next load brings them from there."""
        self._expected[record.id] = record

    def prepare(self, move: Load, load: LoadWork, task: Task) -> FarLoad | None:
        """Have a load's task wait for bytes of the shared tier. None: the extent is not expected, or here already."""
        record = self._expected.pop(move.extent, None)
        if record is None or move.extent in self.stored:
            return None
        return FarLoad(self, move, record, load, task)


class FarLoad:
    """One such load: the mover's task, whose work this is, and the fetch that it follows."""

    def __init__(self, loads: FarLoads, move: Load, record: ExtentRecord, load: LoadWork, task: Task) -> None:
        self._loads = loads
        self._move = move
        self._record = record
        self._load = load
        self._task = task
        self._end: FetchEnd | None = None
        self._failed = False
        self._file = load.file = loads.disk.folder.temporary(record.id)
        task.work, task.arrived, task.label = self._run, 0, "fetch"

    def begin(self) -> None:
        """Begin the fetch; the task has been submitted."""
        move, task = self._move, self._task
        arrived = partial(self._loads.mover.arrived, task)
        urgency = lambda: (task.priority, task.turn)  # noqa: E731
        self._loads.shared.fetch(
            Fetch(move.extent, move.rows, self._file, urgency, self._goes_on, arrived, self._ended)
        )

    def _goes_on(self, _: int, seconds: float) -> bool:
        most = self._move.most_s
        return not (self._failed or self._task.over) and (
            most is None or self._task.priority == DEMAND or seconds <= most
        )

    def _ended(self, end: FetchEnd) -> None:
        self._end = end
        if end.error is not None or self._failed or self._task.over:
            self._unlink()
        self._loads.mover.arrived(self._task, None)

    def _run(self, task: Task) -> int:
        """Read layers that have come; with the last one the file is the disk tier's. Returns bytes as a load does."""
        try:
            if self._end is not None and self._end.error is not None:
                raise self._end.error
            moved = self._load.run(task)
            if task.paused:
                return moved
            assert self._end is not None, "the last layer is told of with the end"
            self._take_over()
            task.seconds = self._end.seconds  # and those of the last reads, which no fetch hides
            return self._end.size - task.bytes
        except (StoreError, OSError) as error:
            blamed = self._blame(task, error)  # before the fetch hears of it, and ends for that reason
            self._failed = True
            self._unlink()
            raise blamed from blamed.__cause__

    def _take_over(self) -> None:
        """Make the file the disk tier's."""
        self._loads.disk.folder.publish(self._file, self._record.id)
        self._loads.stored.add(self._loads.stored.sized(self._record), self._task.advance)

    def _blame(self, task: Task, error: StoreError | OSError) -> StoreError:
        """Find the error that a load has ended with: the fetch's own, if that has failed meanwhile. What came was right: damage is
        the disk's.
        """
        if self._end is not None:
            task.bytes, task.seconds = self._end.size, self._end.seconds
            if self._end.error is not None:
                return self._end.error
        if isinstance(error, StoreError):
            return error
        failed = StoreError(f"taking over extent {self._record.id[:16]}: {error.strerror}")
        failed.__cause__ = error
        return failed

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._file)
