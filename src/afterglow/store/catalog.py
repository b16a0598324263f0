"""The catalog: one SQLite row per extent, written by one thread. Knows rows, not files.

All it says of extents can be read back from them, except when and how often they were used, and how long they are kept since; a catalog that
cannot be read is therefore set aside, never mended, and its notes are lost with it. SQLite has no page checksums, and a token that changes in
the catalog would let a prompt match keys that belong to another: so each row carries a checksum of what never
changes in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, Final, get_args

from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord, Kind, Use
from afterglow.store import notes as note_table
from afterglow.store.extent import crc32c
from afterglow.store.notes import NOTES_MOST, Writes
from afterglow.store.places import RELIC, kind_at, make_file, set_aside

log = logging.getLogger("afterglow.store")

SCHEMA_VERSION: Final = 1
TOUCH_SECONDS: Final = 5.0  # how long last-used times and notes may wait for a transaction of their own

ANSWER_SECONDS: Final = 30.0  # how long its own device may take

_KINDS: Final = frozenset(get_args(Kind))
_COLUMNS: Final = "id, parent, parent_rows, salt, kind, tokens, rows, file, bytes, last_used, hits, crc32c, expires"
_SCHEMA: Final = """
CREATE TABLE extents (
    id TEXT PRIMARY KEY NOT NULL, parent TEXT, parent_rows INTEGER NOT NULL, salt TEXT NOT NULL,
    kind TEXT NOT NULL, tokens BLOB NOT NULL, rows INTEGER NOT NULL,
    file TEXT NOT NULL, bytes INTEGER NOT NULL,
    last_used REAL NOT NULL, hits INTEGER NOT NULL, crc32c INTEGER NOT NULL, expires REAL
)"""

_ROW_BYTES: Final = 1024  # of the file, at most, per block of 64 rows: tokens, the other columns, half-empty pages
_WAL_BYTES: Final = 4 * 1024**2  # what the write-ahead log may take, if a 16th of the budget is not less
_NOTE_BYTES: Final = 64 * 1024**2  # what notes may take, likewise
_SMALL_FILES: Final = 256 * 1024  # description, lock, SQLite's shared memory, an empty catalog
_CHANGE_BYTES: Final = 32 * 1024  # of the write-ahead log's share there are for each row that a transaction changes
# SQLite's primary codes for what is the matter with a file system, not with a database.
_PASSING: Final = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOLFS,
        sqlite3.SQLITE_AUTH,
    }
)

_BESIDE: Final = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a file
NO_NAMES: Final[Mapping[str, str]] = {}

Job = Callable[[sqlite3.Connection], None]
_Noted = tuple[str, str, str | None]  # kind, key, value


def connect(path: Path, journal: str = "WAL", wal_bytes: int = _WAL_BYTES) -> sqlite3.Connection:
    """A connection for writing, the schema made where the file is new. `journal`: SQLite's word for how; `wal_bytes`:
    what the write-ahead log may take. Raises DamageError for another schema, and sqlite3.Error.
    """
    prepare(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.execute("PRAGMA synchronous = NORMAL")
        # Half for what has been committed, and half for the transaction that comes on top of it.
        page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute(f"PRAGMA wal_autocheckpoint = {max(1, wal_bytes // 2 // page_bytes)}")
        db.execute(f"PRAGMA journal_size_limit = {wal_bytes // 2}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.execute("BEGIN")
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
        elif version != SCHEMA_VERSION:
            raise DamageError(f"the catalog has schema {version}, this version uses {SCHEMA_VERSION}")
        note_table.ensure(db)  # a catalog of before there were notes has the same schema otherwise
        if not _has_ends(db):  # nor had they always the last column, which programs that know nothing of it leave empty
            db.execute("ALTER TABLE extents ADD COLUMN expires REAL")
        return db
    except BaseException:
        db.close()
        raise


@dataclass(frozen=True, slots=True)
class Shares:
    """What a catalog may take of a disk budget besides its rows: its write-ahead log, and notes."""

    wal_bytes: int = _WAL_BYTES
    note_bytes: int = _NOTE_BYTES

    @classmethod
    def of(cls, disk_bytes: int) -> Shares:
        """The shares of a budget: no more than a 16th each."""
        return cls(min(_WAL_BYTES, disk_bytes // 16), min(_NOTE_BYTES, disk_bytes // 16))


def budget(disk_bytes: int, block_file_bytes: int) -> int:
    """What of a disk budget is left for extents when the catalog of as many is to fit in it too.

    `block_file_bytes`: the file of an extent of one block, the kind that needs most rows for its size.
    """
    shares = Shares.of(disk_bytes)
    left = disk_bytes - shares.wal_bytes - shares.note_bytes - min(_SMALL_FILES, disk_bytes // 32)
    return max(0, left) * block_file_bytes // (block_file_bytes + _ROW_BYTES)


def failure(path: Path, error: Exception) -> StoreError:
    """What a failed call of SQLite means: DamageError where the file is no catalog, StoreError where it may well be one
    that cannot be read or written now (disk full, I/O, locked, missing rights).
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # not from SQLite itself: bytes that are no UTF-8, for example
        passing = isinstance(error, sqlite3.OperationalError) and "decode" not in str(error).lower()
    else:
        passing = code & 0xFF in _PASSING and not path.is_dir()
    return StoreError(f"{path}: {error}") if passing else DamageError(f"{path}: {error}")


def read_rows(
    db: sqlite3.Connection, names: Mapping[str, str] = NO_NAMES, ordered: bool = True
) -> Iterator[tuple[str, ExtentRecord | None]]:
    """All rows as (id, record), least recently used first if `ordered`; None in place of a record whose row is damaged.

    What comes up again and again is one object: salts, sizes, times; ids, if they are among `names` (each by itself).
    Raises sqlite3.Error.
    """
    same: dict[Any, Any] = {}
    times: dict[float, float] = {}  # apart: 64.0 is 64, and would come back as that
    columns = _COLUMNS if _has_ends(db) else _COLUMNS.replace("expires", "NULL")
    for row in db.execute(f"SELECT {columns} FROM extents{' ORDER BY last_used, id' if ordered else ''}"):
        record = _record(row, names, same, times)
        yield (record.id if record is not None else str(row[0])), record


def _has_ends(db: sqlite3.Connection) -> bool:
    return any(column[1] == "expires" for column in db.execute("PRAGMA table_info(extents)"))


def read_only(path: Path) -> sqlite3.Connection:
    """A connection that writes nothing, also beside the process that owns the catalog. Raises
    sqlite3.Error.
    """
    if kind_at(path) not in ("absent", "file"):
        raise sqlite3.DatabaseError(f"{path} is no regular file")
    uri = path.absolute().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=10.0)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
        return db
    except sqlite3.OperationalError:
        # WAL needs a shared-memory file, which a read-only medium cannot have; nobody writes there either.
        db.close()
        return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)


def relics(path: Path) -> int:
    """Bytes of what `aside` has kept of a file."""
    try:
        return path.with_name(path.name + RELIC).lstat().st_size
    except OSError:
        return 0


def aside(path: Path) -> None:
    """Clear the place of a catalog: what is there becomes `NAME.damaged`, SQLite's files beside it go.

    One such relic is kept, the newest. Raises OSError.
    """
    found = kind_at(path)
    if found != "absent" and (found != "file" or path.lstat().st_size):
        set_aside(path)
    for suffix in ("", *_BESIDE):
        beside = path.with_name(path.name + suffix)
        if kind_at(beside) == "folder":
            set_aside(beside)
        else:
            beside.unlink(missing_ok=True)


def prepare(path: Path) -> None:
    """Before SQLite opens a file: it is there, a regular one that only its owner reads, and so is what SQLite keeps beside
    it, which gets the same rights. Raises DamageError where something else is in its place, and OSError.
    """
    if kind_at(path) not in ("absent", "file"):
        raise DamageError(f"{path} is no regular file")
    for suffix in _BESIDE:
        beside = path.with_name(path.name + suffix)
        if kind_at(beside) not in ("absent", "file"):
            set_aside(beside)
    make_file(path)


def size_of(path: Path) -> int:
    """Bytes of a catalog and of SQLite's files beside it."""
    total = 0
    for suffix in ("", *_BESIDE):
        with contextlib.suppress(OSError):
            total += path.with_name(path.name + suffix).lstat().st_size
    return total


def create(path: Path, records: Iterable[ExtentRecord], file_of: Callable[[str], str]) -> None:
    """A new catalog with these rows in place of what is at `path`, which is set aside: once the new one is complete.

    Raises OSError and sqlite3.Error; then nothing has changed.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        # Nobody needs half of it, so there is no journal, nor a log that would have to be moved along.
        with closing(connect(new, journal="OFF")) as db:
            db.execute("BEGIN")
            for record in records:
                _insert(db, record, file_of(record.id))
            db.execute("COMMIT")
        aside(path)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


class Catalog:
    """The catalog of a locked namespace. Its thread batches what is asked for into few transactions."""

    def __init__(self, path: Path, shares: Shares | None = None) -> None:
        """Raises DamageError when the file is no catalog of this version, StoreError when that cannot be found out."""
        self.path = path
        self.bytes = 0  # of its files, as of the last transaction: nobody else asks the file system
        self._shares = shares or Shares()
        try:
            self._db = connect(path, wal_bytes=self._shares.wal_bytes)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: SQLite quotes what it cannot read
            raise failure(path, error) from error
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | str] = queue.SimpleQueue()
        self._slice = max(1, self._shares.wal_bytes // _CHANGE_BYTES)
        self._longest = min(note_table.VALUE_MOST, self._shares.note_bytes // 8)
        self.notes_damaged = 0
        self.failures = 0  # transactions that failed with uses or notes in them, which nobody else is told of
        self._touched: dict[str, Use] = {}
        self._noted: dict[str, Writes] = {}  # by kind
        self._tally = note_table.Tally()
        self._notes: dict[str, dict[str, str]] = {}  # as they were at the start, until they are asked for
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def load(self, names: Mapping[str, str] = NO_NAMES) -> list[ExtentRecord | str]:
        """All records, and of damaged rows the ids, in any order; then starts the thread: call once, first.

        `names`: see `read_rows`. Raises as `Catalog`.
        """
        try:
            # To order a million rows with their tokens would take SQLite longer than to read them.
            listing = read_rows(self._db, names, ordered=False)
            rows = [record if record is not None else extent for extent, record in listing]
            self._load_notes()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            self._db.close()
            raise failure(self.path, error) from error
        self.bytes = size_of(self.path)
        self._thread = threading.Thread(target=self._work, name="afterglow-catalog", daemon=True)
        self._thread.start()
        return rows

    def _load_notes(self) -> None:
        damaged = []
        for row, (kind, key), value in note_table.read(self._db):
            if value is None:
                damaged.append(row)
            else:
                self._notes.setdefault(kind, {})[key] = value
        note_table.forget(self._db, damaged)
        self.notes_damaged = len(damaged)
        sizes = [note_table.cost(kind, *item) for kind, found in self._notes.items() for item in found.items()]
        self._tally = note_table.Tally({kind: len(found) for kind, found in self._notes.items()}, sum(sizes))

    def add(self, record: ExtentRecord, file: str) -> None:
        """Enter an extent, or replace its row; returns when it is committed. Raises StoreError."""
        self._run(lambda db: _insert(db, record, file))

    def remove(self, extents: Sequence[str]) -> None:
        """Remove rows, few at a time; returns when that is committed. Raises StoreError."""
        names = iter(extents)
        some = list(islice(names, self._slice))
        while True:
            self._run(functools.partial(_delete, extents=some))
            if not (some := list(islice(names, self._slice))):
                return

    def touch(self, uses: Iterable[Use]) -> None:
        """Note how extents were used; written within seconds, together with whatever else is written."""
        with self._lock:
            first = not self._waiting
            self._touched.update((use.extent, use) for use in uses)
        if first:
            self._jobs.put("soon")

    def note(self, kind: str, items: Iterable[tuple[str, str | None]]) -> None:
        """Write notes of a kind by key (None deletes); within seconds, together with whatever else is written.

        Of each kind the 65,536 that were written last are kept, and of all together as many as fit their share. A value
        of more than 64 KiB is not kept, nor is what it was to replace. A transaction that fails loses its notes,
        deletions too (`failures`).
        """
        with self._lock:
            first = not self._waiting
            noted = self._noted.setdefault(kind, OrderedDict())
            for key, value in items:
                if value is not None and note_table.cost(kind, key, value) > self._longest:
                    log.warning("a note of kind %r is too long to be kept: %d characters", kind, len(value))
                    value = None
                noted[key] = value
                noted.move_to_end(key)
            while len(noted) > NOTES_MOST:  # more than can be kept; or the device hangs, and nobody writes them
                noted.popitem(last=False)
        if first:
            self._jobs.put("soon")

    def write_notes(self, within: float = ANSWER_SECONDS) -> None:
        """Write the notes that wait; returns when that is committed. Raises StoreError, also after so many seconds."""
        self._run(lambda db: None, within)

    def notes(self, kind: str) -> dict[str, str]:
        """The sound notes of a kind as they were at the start, last written last. They are handed over: a second
        call gets none.
        """
        return self._notes.pop(kind, {})

    def close(self, timeout: float = 10.0) -> None:
        """Write what is pending and end the thread, for at most `timeout` seconds; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put("end")
            thread.join(timeout)

    @property
    def _waiting(self) -> bool:
        return bool(self._touched or self._noted)

    def _run(self, job: Job, within: float = ANSWER_SECONDS) -> None:
        if self._thread is None:
            raise StoreError("catalog: closed")
        done: Future[None] = Future()
        self._jobs.put((job, done))
        try:
            done.result(timeout=within)  # the catalog's device may hang as well
        except sqlite3.Error as error:
            raise StoreError(f"catalog: {error}") from error
        except TimeoutError as error:
            raise StoreError(f"catalog: no answer for {within:g} s") from error

    def _work(self) -> None:
        ended = False
        while not ended:
            batch: list[tuple[Job, Future[None]]] = []
            try:
                item = self._jobs.get(timeout=TOUCH_SECONDS if self._waiting else None)
                if item == "soon":
                    continue
                while not ended:
                    ended = item == "end"
                    if isinstance(item, tuple):
                        batch.append(item)
                    item = self._jobs.get_nowait()
            except queue.Empty:
                pass
            self._transact(batch)
        self._db.close()

    def _transact(self, batch: Sequence[tuple[Job, Future[None]]]) -> None:
        """What is asked for, and some uses and notes with it; what is left of these in transactions that follow."""
        with self._lock:
            touched, self._touched = self._touched, {}
            noted, self._noted = self._noted, {}
        uses = list(touched.values())
        notes = [(kind, *item) for kind, writes in noted.items() for item in writes.items()]
        while True:
            some = self._few(notes)
            wrong = self._commit([job for job, _ in batch], uses[: self._slice], some)
            if wrong is not None and (uses or notes):
                log.warning("%d uses of extents and %d notes are lost: %s", len(uses), len(notes), wrong)
                self.failures += 1
                uses, notes = [], []
            self.bytes = size_of(self.path)
            for _, done in batch:
                if wrong is None:
                    done.set_result(None)
                else:
                    done.set_exception(wrong)
            batch, uses, notes = [], uses[self._slice :], notes[len(some) :]
            if not (uses or notes):
                return

    def _few(self, notes: Sequence[_Noted]) -> Sequence[_Noted]:
        """As many of them as a transaction should write."""
        left = self._shares.wal_bytes // 4
        for count, (kind, key, value) in enumerate(notes[: self._slice]):
            left -= note_table.cost(kind, key, value or "")
            if left < 0 and count:
                return notes[:count]
        return notes[: self._slice]

    def _commit(self, jobs: Sequence[Job], uses: Sequence[Use], notes: Sequence[_Noted]) -> Exception | None:
        """One transaction; what went wrong, if anything."""
        try:
            noted: dict[str, Writes] = {}
            for kind, key, value in notes:
                noted.setdefault(kind, OrderedDict())[key] = value
            self._db.execute("BEGIN")
            for job in jobs:
                job(self._db)
            changes = [(use.last_used, use.hits, _end(use.expires), use.extent) for use in uses]
            self._db.executemany("UPDATE extents SET last_used = ?, hits = ?, expires = ? WHERE id = ?", changes)
            tally = note_table.write(self._db, noted, self._tally, self._shares.note_bytes)
            self._db.execute("COMMIT")
            self._tally = tally
            return None
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            return error


def _insert(db: sqlite3.Connection, record: ExtentRecord, file: str) -> None:
    names = (record.id, record.parent, record.parent_rows, record.salt, record.kind, file, record.file_bytes)
    values = (
        record.id,
        record.parent,
        record.parent_rows,
        record.salt,
        record.kind,
        record.tokens,
        record.rows,
        file,
        record.file_bytes,
        record.last_used,
        record.hits,
        _row_crc(names, record.tokens),
        _end(record.expires),
    )
    db.execute(f"INSERT OR REPLACE INTO extents ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", values)


def _end(expires: float) -> float | None:
    return expires if expires < inf else None


def _delete(db: sqlite3.Connection, extents: Sequence[str]) -> None:
    db.executemany("DELETE FROM extents WHERE id = ?", [(extent,) for extent in extents])


def _row_crc(names: tuple[Any, ...], tokens: bytes) -> int:
    """`names`: id, parent, parent_rows, salt, kind, file, bytes."""
    return crc32c(repr(names).encode() + tokens)


def _record(
    row: tuple[Any, ...], names: Mapping[str, str], same: dict[Any, Any], times: dict[float, float]
) -> ExtentRecord | None:
    """The record of a row of `_COLUMNS`; None: it is damaged. What is in one of the three mappings is not there twice."""
    extent, parent, parent_rows, salt, kind, tokens, rows, file, size, last_used, hits, crc, expires = row
    try:
        sound = _row_crc((extent, parent, parent_rows, salt, kind, file, size), tokens) == crc
        if not (sound and len(tokens) // 4 == rows and kind in _KINDS):
            return None
        used, end = float(last_used), float(expires) if expires is not None else inf
        return ExtentRecord(
            names.get(extent, extent),
            names.get(parent, parent),
            same.setdefault(parent_rows, parent_rows),
            same.setdefault(salt, salt),
            same.setdefault(kind, kind),
            tokens,
            same.setdefault(size, size),
            times.setdefault(used, used),
            int(hits),
            times.setdefault(end, end),
        )
    except (TypeError, ValueError):
        return None
