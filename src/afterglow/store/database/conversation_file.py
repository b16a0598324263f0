"""The SQLite file of stored conversations, or memory where no file can be used. Knows transactions and damage, not tables."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from afterglow.errors import DamageError, StoreError
from afterglow.store.database.connection import Schema, aside, connect, transact, wal_share

log = logging.getLogger("afterglow.store")
T = TypeVar("T")

CLOSE_SECONDS: Final = 5.0


class ConversationFile:
    """A file that is begun anew when it is damaged. Safe to use from several threads.

    `damaged` counts files that were begun anew, and rows that were dropped, because they were damaged.
    """

    def __init__(self, path: Path | None, schema: Schema, max_bytes: int) -> None:
        """`path` None: in memory. `max_bytes`: what the file may take."""
        self.max_bytes = max_bytes
        self.wal_bytes = wal_share(max_bytes)
        self.damaged = 0
        self._path = path
        self._schema = schema
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = self._open()

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Carry out `work` in a transaction. A file that turns out to be damaged is set aside, and the work done on a new one.

        Raises:
            StoreError: the file is closed, or cannot be read or written.
        """
        with self._lock:
            if self._db is None:
                raise StoreError("conversations: closed")
            try:
                try:
                    return transact(self._db, work)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._db.close()
                    self._db = self._begin_anew(error)
                return transact(self._db, work)
            except sqlite3.Error as error:
                raise StoreError(f"conversations: {error}") from error

    def close(self) -> None:
        """Close the file; may be called twice. A file that a call waits for in vain is left as it is."""
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            log.warning("%s is not closed: the disk does not answer", self._path)
            return
        try:
            db, self._db = self._db, None
            if db is not None:
                db.close()
        finally:
            self._lock.release()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect(self._path)
        except DamageError as error:
            return self._begin_anew(error)
        except (OSError, sqlite3.Error) as error:
            return self._begin_anew(error) if _is_damage(error) else self._without_file(error)

    def _begin_anew(self, why: Exception) -> sqlite3.Connection:
        assert self._path is not None, "memory has no file to be damaged"
        self.damaged += 1
        try:
            aside(self._path)
            db = self._connect(self._path)
        except (OSError, StoreError, sqlite3.Error) as error:
            return self._without_file(error)
        name = self._path.name
        log.warning("%s was damaged (%s): it is now %s.damaged, and a new one is begun", self._path, why, name)
        return db

    def _without_file(self, why: Exception) -> sqlite3.Connection:
        log.warning("%s cannot be used (%s): conversations are kept in memory only", self._path, why)
        return self._connect(None)

    def _connect(self, path: Path | None) -> sqlite3.Connection:
        # Deleted texts are wiped: a client that deletes a response expects that it is not readable in the file.
        return connect(path, self._schema, wal_bytes=self.wal_bytes, log_limit=self.wal_bytes, wipe=True)


def used_bytes(db: sqlite3.Connection) -> int:
    """Count the bytes of the file that hold something: freed pages are used again."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _is_damage(error: Exception) -> bool:
    # Its subclasses say something else: a full disk, a locked file, missing rights. It is still a database then.
    # (Bytes that are no UTF-8 are reported as an operational error of SQLite's.)
    undecodable = isinstance(error, sqlite3.OperationalError) and "decode" in str(error).lower()
    return type(error) is sqlite3.DatabaseError or undecodable
