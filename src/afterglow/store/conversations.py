"""Responses that a client may go on from by their id: what was asked and answered, as text. And replies to clients that
send their conversations back themselves, so that their ids are known.

One SQLite file beside the extents, or none at all (`folder` None: in memory, gone with the process). A response names
the one before it, so that a conversation is a tree of responses; it expires, and is evicted, as a whole, since a turn
without the turns before it means something else. Everything in it is one tenant's own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

from afterglow.errors import DamageError, StoreError
from afterglow.store.catalog import aside, prepare
from afterglow.store.extent import crc32c
from afterglow.store.places import remove

log = logging.getLogger("afterglow.store")
T = TypeVar("T")
Item = dict[str, Any]

FILE: Final = "conversations.sqlite"
TTL_S: Final = 30 * 24 * 3600.0  # what OpenAI promises
MAX_BYTES: Final = 256 * 1024**2
MAX_DEPTH: Final = 10_000  # responses of one conversation
SWEEP_SECONDS: Final = 600.0
CLOSE_SECONDS: Final = 5.0

_SCHEMA_VERSION: Final = 1
_WAL_BYTES: Final = 4 * 1024**2
_SHM_BYTES: Final = 64 * 1024
_LARGEST: Final = 8  # a response may take this part of what may be kept
# What a conversation's responses share is in a table of its own: to write `expires` into each of them again at every
# turn would mean to write their texts again.
_SCHEMA: Final = """
CREATE TABLE conversations (root TEXT PRIMARY KEY NOT NULL, expires REAL NOT NULL);
CREATE INDEX by_expiry ON conversations (expires);
CREATE TABLE responses (
    id TEXT PRIMARY KEY NOT NULL, tenant TEXT NOT NULL, previous TEXT, root TEXT NOT NULL, created REAL NOT NULL,
    model TEXT NOT NULL, body TEXT NOT NULL, items TEXT NOT NULL, crc32c INTEGER NOT NULL
);
CREATE INDEX by_root ON responses (root);
CREATE INDEX by_tenant ON responses (tenant);
"""
# A table of its own that earlier files lack. `chain` names what a reply answered, `salt` and `session` whose it is.
_REPLIES: Final = """
CREATE TABLE IF NOT EXISTS replies (
    chain TEXT PRIMARY KEY NOT NULL, salt TEXT NOT NULL, session TEXT, expires REAL NOT NULL, body TEXT NOT NULL,
    crc32c INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS replies_by_expiry ON replies (expires);
CREATE INDEX IF NOT EXISTS replies_by_owner ON replies (salt, session);
"""
REPLIES_MOST: Final = 16_384
_COLUMNS: Final = "r.id, r.tenant, r.previous, r.root, r.created, c.expires, r.model, r.body, r.items, r.crc32c"
_DUE: Final = "SELECT root FROM conversations WHERE expires <= ?"
_FROM: Final = "responses r JOIN conversations c ON c.root = r.root AND c.expires > ?"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. `body` is what the client got, `items` what was said in this turn: its input, then its output."""

    id: str
    previous: str | None
    root: str
    created: float
    expires: float
    model: str
    body: dict[str, Any]
    items: list[Item]


class Conversations:
    """Safe to use from several threads. Calls read and write a file: not for an event loop."""

    def __init__(
        self,
        folder: Path | None,
        *,
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s`: how long after its last turn a conversation is kept. `max_bytes`: size of the file; beyond it the
        conversations that were not used for longest are dropped (`footprint`: with what SQLite keeps beside it)."""
        self.folder = folder
        self._path = None if folder is None else folder / FILE
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._wal_bytes = _wal_bytes(max_bytes)
        self._clock = clock
        self.damaged = (
            0  # files that were begun anew, and rows that were dropped, because they were not what was written
        )
        self._swept = float("-inf")
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = self._open()
        with contextlib.suppress(StoreError):
            self.sweep()

    def add(
        self,
        response: str,
        tenant: str,
        previous: str | None,
        model: str,
        body: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep a response; its whole conversation is in use again. Raises StoreError (disk full, id taken, no
        `previous` of this tenant: it may have been deleted in the meantime)."""
        texts = (_text(body), _text(items))
        size = sum(map(len, texts))
        if size > self._max_bytes // _LARGEST:
            raise StoreError(f"conversations: one response is larger than {self._max_bytes // _LARGEST} bytes")
        self._make_room(size, previous, tenant)

        def work(db: sqlite3.Connection) -> None:
            now = self._clock()
            before = None if previous is None else self._find(db, previous, tenant)
            if previous is not None and before is None:
                raise StoreError(f"{previous} is not stored any more")
            root = response if before is None else before.root
            crc = _crc(response, tenant, previous, root, now, model, *texts)
            row = (response, tenant, previous, root, now, model, *texts, crc)
            db.execute(
                "INSERT INTO conversations VALUES (?, ?) ON CONFLICT (root) DO UPDATE SET expires = excluded.expires",
                (root, now + self._ttl_s),
            )
            db.execute("INSERT INTO responses VALUES (?,?,?,?,?,?,?,?,?)", row)

        self._run(work)
        if self._clock() - self._swept >= SWEEP_SECONDS:
            self.sweep()

    def get(self, response: str, tenant: str) -> StoredResponse | None:
        """A response of this tenant; None for any other id, an expired one, and damage. Raises StoreError."""
        return self._run(lambda db: self._find(db, response, tenant))

    def delete(self, response: str, tenant: str) -> bool:
        """Forget one response (what came after it can then not be gone on from any more). Raises StoreError."""

        def work(db: sqlite3.Connection) -> bool:
            found = self._find(db, response, tenant)
            if found is None:
                return False
            db.execute("DELETE FROM responses WHERE id = ?", (response,))
            db.execute(
                "DELETE FROM conversations WHERE root = ? AND NOT EXISTS (SELECT 1 FROM responses WHERE root = ?)",
                (found.root, found.root),
            )
            return True

        return self._run(work)

    def chain(self, response: str, tenant: str) -> list[Item] | None:
        """What was said up to and in a response, oldest first; None if it, or one before it, is not there (deleted,
        damaged, another tenant's, more than MAX_DEPTH). Raises StoreError."""

        def work(db: sqlite3.Connection) -> list[Item] | None:
            turns: list[list[Item]] = []
            at: str | None = response
            while at is not None:
                # A response is entered after the one it names, so there can be no circle but by damage: the bound
                # is for that as well.
                found = self._find(db, at, tenant) if len(turns) < MAX_DEPTH else None
                if found is None:
                    return None
                turns.append(found.items)
                at = found.previous
            return [item for items in reversed(turns) for item in items]

        return self._run(work)

    # -------------------------------------------------------------------------------------------------- replies

    def keep_reply(
        self,
        chain: str,
        salt: str,
        session: str | None,
        body: Mapping[str, Any],
        ends: float = inf,
        before: Sequence[str] = (),
    ) -> None:
        """Keep a reply, and those `before` it in its conversation, until `ends`, and no longer than responses. Only the
        first half of the file is for replies, and for no more than REPLIES_MOST: those that expire first make room. Raises
        StoreError."""
        text = _text(body)
        expires = min(self._clock() + self._ttl_s, ends)

        def work(db: sqlite3.Connection) -> None:
            (number,) = db.execute("SELECT COUNT(*) FROM replies").fetchone()
            while number and (number >= REPLIES_MOST or _used_bytes(db) + len(text) > self._max_bytes // 2):
                some = min(number, 16)
                db.execute(
                    "DELETE FROM replies WHERE chain IN (SELECT chain FROM replies ORDER BY expires LIMIT ?)", (some,)
                )
                number -= some
            if _used_bytes(db) + len(text) <= self._max_bytes // 2:
                row = (chain, salt, session, expires, text, _crc(chain, salt, session, text))
                db.execute("INSERT OR REPLACE INTO replies VALUES (?,?,?,?,?,?)", row)
            later = [(expires, each, expires) for each in before]
            db.executemany("UPDATE replies SET expires = ? WHERE chain = ? AND expires < ?", later)

        self._run(work)

    def replies(self) -> list[tuple[str, str, dict[str, Any], float]]:
        """(chain, salt, body, when it expires) of all replies, those that expire first at the beginning; damaged ones are left out. Raises
        StoreError."""

        def work(db: sqlite3.Connection) -> list[tuple[str, str, dict[str, Any], float]]:
            found, bad = [], []
            query = "SELECT chain, salt, session, body, crc32c, expires FROM replies WHERE expires > ? ORDER BY expires"
            for chain, salt, session, body, crc, expires in db.execute(query, (self._clock(),)):
                if _crc(chain, salt, session, body) == crc:
                    found.append((chain, salt, json.loads(body), float(expires)))
                else:
                    bad.append(chain)
            self.damaged += len(bad)
            db.executemany("DELETE FROM replies WHERE chain = ?", [(chain,) for chain in bad])
            return found

        return self._run(work)

    def forget_replies(self, salts: Sequence[str] | None = None, session: str | None = None) -> None:
        """Forget the replies under these salts (None: all), of one conversation or of any. Raises StoreError."""

        def work(db: sqlite3.Connection) -> None:
            if salts is None:
                db.execute("DELETE FROM replies")
            for salt in salts or ():
                db.execute(
                    "DELETE FROM replies WHERE salt = ? AND (? IS NULL OR session = ?)", (salt, session, session)
                )

        self._run(work)

    def forget_tenants_replies(self, tenant: str) -> None:
        """Forget the replies under all salts of a tenant (TENANT/SALT). Raises StoreError."""
        start = f"{tenant}/"
        self._run(lambda db: db.execute("DELETE FROM replies WHERE substr(salt, 1, ?) = ?", (len(start), start)))

    def count(self, tenant: str) -> tuple[int, int]:
        """How many responses a tenant has here, and bytes of their text. Raises StoreError."""

        def work(db: sqlite3.Connection) -> tuple[int, int]:
            sizes = "COUNT(*), COALESCE(SUM(LENGTH(body) + LENGTH(items)), 0)"
            number, size = db.execute(
                f"SELECT {sizes} FROM {_FROM} WHERE r.tenant = ?", (self._clock(), tenant)
            ).fetchone()
            return int(number), int(size)

        return self._run(work)

    def sweep(self) -> int:
        """Drop what has expired; returns how many responses that were. Raises StoreError."""
        self._swept = self._clock()

        gone = 0
        while some := self._run(lambda db: self._drop_some(db, f"root IN ({_DUE})", self._swept)):
            gone += some
        self._run(lambda db: db.execute("DELETE FROM conversations WHERE expires <= ?", (self._swept,)))
        self._run(lambda db: db.execute("DELETE FROM replies WHERE expires <= ?", (self._swept,)))
        return gone

    def close(self) -> None:
        """Close the file; may be called twice. One that a call waits for in vain is left as it is."""
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            log.warning("%s is not closed: the disk does not answer", self._path)
            return
        try:
            db, self._db = self._db, None
            if db is not None:
                db.close()
        finally:
            self._lock.release()

    # ---------------------------------------------------------------------------------------------- inside

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in a transaction. A file that turns out to be damaged is set aside, and the work done on a new one."""
        with self._lock:
            if self._db is None:
                raise StoreError("conversations: closed")
            try:
                return _transact(self._db, work)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise StoreError(f"conversations: {error}") from error
                self._db.close()
                self._db = self._begin_anew(error)
                try:
                    return _transact(self._db, work)
                except sqlite3.Error as again:
                    raise StoreError(f"conversations: {again}") from again
            except sqlite3.Error as error:
                raise StoreError(f"conversations: {error}") from error

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self._path, self._wal_bytes)
        except DamageError as error:
            return self._begin_anew(error)
        except (OSError, sqlite3.Error) as error:
            return self._begin_anew(error) if _is_damage(error) else self._without_file(error)

    def _begin_anew(self, why: Exception) -> sqlite3.Connection:
        assert self._path is not None, "memory has no file to be damaged"
        self.damaged += 1
        try:
            aside(self._path)
            db = _connect(self._path, self._wal_bytes)
        except (OSError, StoreError, sqlite3.Error) as error:
            return self._without_file(error)
        log.warning("%s was damaged (%s): it is now %s.damaged, and a new one is begun", self._path, why, FILE)
        return db

    def _without_file(self, why: Exception) -> sqlite3.Connection:
        log.warning("%s cannot be used (%s): conversations are kept in memory only", self._path, why)
        return _connect(None, self._wal_bytes)

    def _find(self, db: sqlite3.Connection, response: str, tenant: str) -> StoredResponse | None:
        query = f"SELECT {_COLUMNS} FROM {_FROM} WHERE r.id = ? AND r.tenant = ?"
        try:
            row = db.execute(query, (self._clock(), response, tenant)).fetchone()
            return None if row is None else _stored(row)
        except (ValueError, TypeError, sqlite3.OperationalError) as error:
            if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error).lower():
                raise  # (bytes that are no UTF-8 are reported in this way)
            log.warning("response %s is damaged and is forgotten: %s", response, error)
            self.damaged += 1
            db.execute("DELETE FROM responses WHERE id = ?", (response,))
            return None

    def _make_room(self, size: int, previous: str | None, tenant: str) -> None:
        """Drop conversations, the longest unused first, until a response of `size` bytes fits. Errors: StoreError."""
        need = size + size // 256 + 4 * 4096  # its pages, and those of the indices

        def work(db: sqlite3.Connection) -> bool:
            if _used_bytes(db) + need <= self._max_bytes:
                return False
            before = None if previous is None else self._find(db, previous, tenant)
            keep = "" if before is None else before.root
            oldest = db.execute(
                "SELECT root FROM conversations WHERE root != ? ORDER BY expires, root LIMIT 1", (keep,)
            ).fetchone()
            if oldest is None:
                raise StoreError(f"conversations: one alone is larger than {self._max_bytes} bytes")
            # Nobody sees a part of it: it has expired from now on.
            db.execute("UPDATE conversations SET expires = ? WHERE root = ?", (float("-inf"), *oldest))
            if not self._drop_some(db, "root = ?", *oldest):
                db.execute("DELETE FROM conversations WHERE root = ?", oldest)
            return True

        while self._run(work):
            pass

    def _drop_some(self, db: sqlite3.Connection, which: str, *values: object) -> int:
        """Delete some responses, few enough for one transaction: all that is blanked passes through the write-ahead log."""
        found = db.execute(f"SELECT id, LENGTH(body) + LENGTH(items) FROM responses WHERE {which} LIMIT 64", values)
        left, gone = self._wal_bytes // 2, 0
        for response, size in found.fetchall():
            left -= size or 0
            if left < 0 and gone:
                break
            db.execute("DELETE FROM responses WHERE id = ?", (response,))
            gone += 1
        return gone


def footprint(max_bytes: int) -> int:
    """What the file and SQLite's files beside it take at most."""
    return max_bytes + max_bytes // _LARGEST + 2 * _wal_bytes(max_bytes) + _SHM_BYTES


def _wal_bytes(max_bytes: int) -> int:
    return min(_WAL_BYTES, max_bytes // 16)


def erase(folder: Path) -> None:
    """Remove the file of a namespace that nobody has open. Raises OSError."""
    for file in folder.glob(f"{FILE}*"):
        remove(file)


def _is_damage(error: Exception) -> bool:
    # Its subclasses say something else: a full disk, a locked file, missing rights. It is still a database then.
    return type(error) is sqlite3.DatabaseError


def _connect(path: Path | None, wal_bytes: int) -> sqlite3.Connection:
    if path is not None:
        prepare(path)
    db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
        db.execute(f"PRAGMA wal_autocheckpoint = {max(1, wal_bytes // 2 // page_bytes)}")
        db.execute(f"PRAGMA journal_size_limit = {wal_bytes}")
        db.execute("PRAGMA secure_delete = ON")  # what a client deletes shall not be readable in the file
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT")
        elif version != _SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"it has schema {version}, this version uses {_SCHEMA_VERSION}")
        db.executescript(f"BEGIN; {_REPLIES} COMMIT")
        return db
    except BaseException:
        db.close()
        raise


def _transact(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    db.execute("BEGIN IMMEDIATE")
    try:
        result = work(db)
        db.execute("COMMIT")
        return result
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _used_bytes(db: sqlite3.Connection) -> int:
    """Bytes of the file that hold something: freed pages are used again."""
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _stored(row: tuple[Any, ...]) -> StoredResponse:
    """Raises ValueError or TypeError for a damaged row: SQLite's pages have no checksums."""
    response, tenant, previous, root, created, expires, model, body, items, crc = row
    if _crc(response, tenant, previous, root, created, model, body, items) != crc:
        raise ValueError("wrong checksum")
    return StoredResponse(response, previous, root, created, expires, model, json.loads(body), json.loads(items))


def _crc(*values: object) -> int:
    return crc32c(repr(values).encode("utf-8", "backslashreplace"))


def _text(value: object) -> str:
    # ASCII, so that a lone surrogate of a client's JSON can be stored.
    return json.dumps(value, separators=(",", ":"))
