"""The catalog: one SQLite row per extent, written by one thread. Knows no files of extents.

All it says of extents can be read back from them, except when and how often they were used, and how long they are kept since. A
catalog that cannot be read is therefore set aside, never mended, and its notes are lost with it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sqlite3
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from afterglow.errors import StoreError
from afterglow.plan.step import ExtentRecord, Use
from afterglow.store.database import connection, notes, rows
from afterglow.store.database.connection import WAL_BYTES, Schema, failure, size_of, wal_share
from afterglow.store.database.notes import NOTES_MOST, NoteTotals, Writes
from afterglow.store.worker import Worker

log = logging.getLogger("afterglow.store")

SCHEMA: Final = Schema(1, [rows.TABLE], later=[notes.TABLE])
TOUCH_SECONDS: Final = 5.0  # how long last-used times and notes may wait for a transaction of their own
ANSWER_SECONDS: Final = 30.0  # how long the catalog's device may take

_ROW_BYTES: Final = 1024  # of the file, at most, per block of 64 rows: tokens, the other columns, half-empty pages
_NOTE_BYTES: Final = 64 * 1024**2  # what notes may take, if a 16th of the budget is not less
_SMALL_FILES: Final = 256 * 1024  # description, lock, SQLite's shared memory, an empty catalog
_CHANGE_BYTES: Final = 32 * 1024  # of the write-ahead log's share, for each row that a transaction changes

Change = Callable[[sqlite3.Connection], None]
_Noted = tuple[str, str, str | None]  # kind, key, value
_Waiting = tuple[Change, Future[None]]


@dataclass(frozen=True, slots=True)
class CatalogShares:
    """What a catalog may take of a disk budget besides its rows: its write-ahead log, and notes."""

    wal_bytes: int = WAL_BYTES
    note_bytes: int = _NOTE_BYTES

    @classmethod
    def of(cls, disk_bytes: int) -> CatalogShares:
        """Compute the shares of a budget: no more than a 16th each."""
        return cls(wal_share(disk_bytes), min(_NOTE_BYTES, disk_bytes // 16))


def budget(disk_bytes: int, block_file_bytes: int) -> int:
    """Compute the part of a disk budget that extents may take when their catalog must fit in it too.

    `block_file_bytes`: the file of an extent of one block, the kind that needs most rows for its size.
    """
    shares = CatalogShares.of(disk_bytes)
    left = disk_bytes - shares.wal_bytes - shares.note_bytes - min(_SMALL_FILES, disk_bytes // 32)
    return max(0, left) * block_file_bytes // (block_file_bytes + _ROW_BYTES)


def open_tables(path: Path, wal_bytes: int = WAL_BYTES, journal: str = "WAL") -> sqlite3.Connection:
    """Open a catalog for writing, and bring the tables of older programs up to date.

    Raises:
        DamageError: the file is no catalog of this version.
        OSError, sqlite3.Error: it cannot be opened.
    """
    db = connection.connect(path, SCHEMA, wal_bytes=wal_bytes, log_limit=wal_bytes // 2, journal=journal)
    try:
        rows.add_expiry(db)
        return db
    except BaseException:
        db.close()
        raise


class Catalog:
    """The catalog of a locked namespace. Its thread batches changes into few transactions."""

    def __init__(self, path: Path, shares: CatalogShares | None = None) -> None:
        """Open the file.

        Raises:
            DamageError: the file is no catalog of this version.
            StoreError: that cannot be found out now.
        """
        self.path = path
        self.bytes = 0  # of its files, as of the last transaction, so that no other thread asks the file system
        self._shares = shares or CatalogShares()
        try:
            self._db = open_tables(path, self._shares.wal_bytes)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: SQLite quotes what it cannot read
            raise failure(path, error) from error
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        self._slice = max(1, self._shares.wal_bytes // _CHANGE_BYTES)
        self._longest = min(notes.VALUE_MOST, self._shares.note_bytes // 8)
        self.notes_damaged = 0
        self.failures = 0  # transactions that failed with uses or notes in them, which no caller is told of
        self._touched: dict[str, Use] = {}
        self._noted: dict[str, Writes] = {}  # by kind
        self._totals = NoteTotals()
        self._notes: dict[str, dict[str, str]] = {}  # as they were at the start, until they are handed over
        self._lock = threading.Lock()
        self._worker: Worker[_Waiting] | None = None

    def load(self, names: Mapping[str, str] = rows.NO_NAMES) -> list[ExtentRecord | str]:
        """Read all records, and the ids of damaged rows, in any order; then start the thread. Call it once, before all else.

        `names`: see `read_rows`.

        Raises:
            DamageError, StoreError: as `Catalog`.
        """
        try:
            # To order a million rows with their tokens would take SQLite longer than to read them.
            listing = rows.read_rows(self._db, names, ordered=False)
            found = [record if record is not None else extent for extent, record in listing]
            self._load_notes()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            self._db.close()
            raise failure(self.path, error) from error
        self.bytes = size_of(self.path)
        self._worker = Worker("afterglow-catalog", self._carry_out, self._db.close)
        return found

    def _load_notes(self) -> None:
        damaged = []
        for row, (kind, key), value in notes.read(self._db):
            if value is None:
                damaged.append(row)
            else:
                self._notes.setdefault(kind, {})[key] = value
        notes.forget(self._db, damaged)
        self.notes_damaged = len(damaged)
        sizes = [notes.cost(kind, *item) for kind, found in self._notes.items() for item in found.items()]
        self._totals = NoteTotals({kind: len(found) for kind, found in self._notes.items()}, sum(sizes))

    def add(self, record: ExtentRecord, file: str) -> None:
        """Enter an extent, or replace its row; return when that is committed.

        Raises:
            StoreError: it is not written, or not within 30 seconds.
        """
        self._run(lambda db: rows.insert(db, record, file))

    def remove(self, extents: Sequence[str]) -> int:
        """Remove rows, few at a time; return the number of removed rows when that is committed.

        Raises:
            StoreError: they are not removed, or not within 30 seconds.
        """
        removed: list[int] = []
        for start in range(0, len(extents) or 1, self._slice):  # without any, what waits is committed
            self._run(functools.partial(_remove, extents=extents[start : start + self._slice], removed=removed))
        return sum(removed)

    def touch(self, uses: Iterable[Use]) -> None:
        """Note how extents were used; written within seconds, together with other changes."""
        with self._lock:
            first = not self._waiting
            self._touched.update((use.extent, use) for use in uses)
        if first:
            self._wake()

    def note(self, kind: str, items: Iterable[tuple[str, str | None]]) -> None:
        """Write notes of a kind by key (None deletes); within seconds, together with other changes.

        The 65,536 of each kind that were written last are kept, and of all kinds as many as fit their share. A value of more
        than 64 KiB is not kept, nor is the value that it replaces. A transaction that fails loses its notes, deletions too
        (`failures`).
        """
        with self._lock:
            first = not self._waiting
            noted = self._noted.setdefault(kind, OrderedDict())
            for key, value in items:
                if value is not None and notes.cost(kind, key, value) > self._longest:
                    log.warning("a note of kind %r is too long to be kept: %d characters", kind, len(value))
                    value = None
                noted[key] = value
                noted.move_to_end(key)
            while len(noted) > NOTES_MOST:  # more than can be kept; or the device hangs, and none is written
                noted.popitem(last=False)
        if first:
            self._wake()

    def write_notes(self, within: float = ANSWER_SECONDS) -> None:
        """Write the notes that wait; return when that is committed.

        Raises:
            StoreError: they are not written, or not `within` so many seconds.
        """
        self._run(lambda db: None, within)

    def notes(self, kind: str) -> dict[str, str]:
        """Hand over the sound notes of a kind as they were at the start, last written last. A second call gets none."""
        return self._notes.pop(kind, {})

    def close(self, timeout: float = 10.0) -> None:
        """Write pending changes and end the thread, for at most `timeout` seconds; may be called twice."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(timeout)

    @property
    def _waiting(self) -> bool:
        return bool(self._touched or self._noted)

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake(TOUCH_SECONDS)

    def _run(self, change: Change, within: float = ANSWER_SECONDS) -> None:
        done: Future[None] = Future()
        if self._worker is None or not self._worker.put((change, done)):
            raise StoreError("catalog: closed")
        try:
            done.result(timeout=within)  # the catalog's device may hang as well
        except sqlite3.Error as error:
            raise StoreError(f"catalog: {error}") from error
        except TimeoutError as error:
            raise StoreError(f"catalog: no answer for {within:g} s") from error

    def _carry_out(self, changes: deque[_Waiting]) -> None:
        batch = list(changes)
        changes.clear()
        if batch or self._waiting:
            self._transact(batch)

    def _transact(self, batch: Sequence[_Waiting]) -> None:
        """Commit a batch of changes with some uses and notes, and the rest of these in transactions that follow."""
        with self._lock:
            touched, self._touched = self._touched, {}
            noted, self._noted = self._noted, {}
        uses = list(touched.values())
        left = [(kind, *item) for kind, writes in noted.items() for item in writes.items()]
        while True:
            some = self._few(left)
            wrong = self._commit([change for change, _ in batch], uses[: self._slice], some)
            if wrong is not None and (uses or left):
                log.warning("%d uses of extents and %d notes are lost: %s", len(uses), len(left), wrong)
                self.failures += 1
                uses, left = [], []
            self.bytes = size_of(self.path)
            for _, done in batch:
                if wrong is None:
                    done.set_result(None)
                else:
                    done.set_exception(wrong)
            batch, uses, left = [], uses[self._slice :], left[len(some) :]
            if not (uses or left):
                return

    def _few(self, writes: Sequence[_Noted]) -> Sequence[_Noted]:
        """Take as many notes as one transaction should write."""
        room = self._shares.wal_bytes // 4
        for count, (kind, key, value) in enumerate(writes[: self._slice]):
            room -= notes.cost(kind, key, value or "")
            if room < 0 and count:
                return writes[:count]
        return writes[: self._slice]

    def _commit(self, changes: Sequence[Change], uses: Sequence[Use], writes: Sequence[_Noted]) -> Exception | None:
        """Carry out one transaction; return the error that stopped it, if any."""
        try:
            noted: dict[str, Writes] = {}
            for kind, key, value in writes:
                noted.setdefault(kind, OrderedDict())[key] = value
            self._db.execute("BEGIN")
            for change in changes:
                change(self._db)
            rows.update_uses(self._db, uses)
            totals = notes.write(self._db, noted, self._totals, self._shares.note_bytes)
            self._db.execute("COMMIT")
            self._totals = totals
            return None
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            return error


def _remove(db: sqlite3.Connection, extents: Sequence[str], removed: list[int]) -> None:
    """Remove rows, and note how many there were."""
    removed.append(rows.delete(db, extents))
