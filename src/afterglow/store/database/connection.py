"""SQLite files of a namespace: opened with the right pragmas and rights, measured, and set aside when they are damaged.

Knows connections and files, not tables.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from afterglow.errors import DamageError, StoreError
from afterglow.store.places import RELIC, kind_at, make_file, set_aside

T = TypeVar("T")
WAL_BYTES: Final = 4 * 1024**2  # what a write-ahead log may take, if a 16th of its owner's budget is not less

# SQLite's primary codes for a fault of the file system, not of the database.
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


@dataclass(frozen=True, slots=True)
class Schema:
    """Statements that make the tables of a new file, and the number that says which tables a file has.

    `later`: statements for tables added without a new number, because older programs do not mind them. They have no effect on
    a file that has these tables.
    """

    version: int
    tables: Sequence[str]
    later: Sequence[str] = ()


def wal_share(budget: int) -> int:
    """Compute what the write-ahead log may take of its owner's budget in bytes."""
    return min(WAL_BYTES, budget // 16)


def connect(
    path: Path | None, schema: Schema, *, wal_bytes: int, log_limit: int, journal: str = "WAL", wipe: bool = False
) -> sqlite3.Connection:
    """Open a file for writing and make its tables where it is new. `path` None: in memory.

    `wal_bytes`: the space for the write-ahead log while transactions run; `log_limit`: the size SQLite cuts it to later.
    `journal`: SQLite's word for the journal mode. `wipe`: overwrite deleted contents.

    Raises:
        DamageError: something else lies in the file's place, or it has another schema.
        OSError, sqlite3.Error: it cannot be opened.
    """
    if path is not None:
        prepare(path)
    db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.execute("PRAGMA synchronous = NORMAL")
        # Half for committed transactions, and half for the one that comes on top.
        page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute(f"PRAGMA wal_autocheckpoint = {max(1, wal_bytes // 2 // page_bytes)}")
        db.execute(f"PRAGMA journal_size_limit = {log_limit}")
        if wipe:
            db.execute("PRAGMA secure_delete = ON")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in ("BEGIN", *schema.tables, f"PRAGMA user_version = {schema.version}", "COMMIT"):
                db.execute(statement)
        elif version != schema.version:
            raise DamageError(f"it has schema {version}, this version uses {schema.version}")
        for statement in schema.later:
            db.execute(statement)
        return db
    except BaseException:
        db.close()
        raise


def read_only(path: Path) -> sqlite3.Connection:
    """Open a file without ever writing to it, also beside the process that owns it.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    if kind_at(path) not in ("absent", "file"):
        raise sqlite3.DatabaseError(f"{path} is no regular file")
    uri = path.absolute().as_uri()
    db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=10.0)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
        return db
    except sqlite3.OperationalError:
        # WAL needs a shared-memory file, which a read-only medium cannot have; no other process writes there either.
        db.close()
        return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)


def transact(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    """Carry out `work` in one transaction, all or nothing. Exceptions pass through."""
    db.execute("BEGIN IMMEDIATE")
    try:
        result = work(db)
        db.execute("COMMIT")
        return result
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def failure(path: Path, error: Exception) -> StoreError:
    """Tell damage from faults that pass: DamageError where the file is no database of ours, StoreError where it may well be one
    that cannot be read or written now (disk full, I/O, locked, missing rights).
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # not from SQLite itself: bytes that are no UTF-8, for example
        passing = isinstance(error, sqlite3.OperationalError) and "decode" not in str(error).lower()
    else:
        passing = code & 0xFF in _PASSING and not path.is_dir()
    return StoreError(f"{path}: {error}") if passing else DamageError(f"{path}: {error}")


def prepare(path: Path) -> None:
    """Make a file before SQLite opens it: a regular one that only its owner reads. SQLite gives the same rights to what it keeps
    beside the file.

    Raises:
        DamageError: something else is in its place.
        OSError: it cannot be made.
    """
    if kind_at(path) not in ("absent", "file"):
        raise DamageError(f"{path} is no regular file")
    for beside in _beside(path):
        if kind_at(beside) not in ("absent", "file"):
            set_aside(beside)
    make_file(path)


def aside(path: Path) -> None:
    """Clear the place of a file: the entry there becomes `NAME.damaged`, SQLite's files beside it go.

    One such relic is kept, the newest.

    Raises:
        OSError: the file cannot be renamed or removed.
    """
    found = kind_at(path)
    if found != "absent" and (found != "file" or path.lstat().st_size):
        set_aside(path)
    for file in (path, *_beside(path)):
        if kind_at(file) == "folder":
            set_aside(file)
        else:
            file.unlink(missing_ok=True)


def relic_bytes(path: Path) -> int:
    """Count the bytes of the relic that `aside` has kept of a file."""
    try:
        return path.with_name(path.name + RELIC).lstat().st_size
    except OSError:
        return 0


def size_of(path: Path) -> int:
    """Count the bytes of a file and of SQLite's files beside it."""
    total = 0
    for file in (path, *_beside(path)):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return total


def _beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in _BESIDE]
