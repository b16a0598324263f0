"""Responses that a client may go on from by their id: input and output of each turn, as text.

One SQLite file beside the extents, or none at all (`folder` None: in memory, gone with the process). A response names
the one before it, so that a conversation is a tree of responses. A conversation expires, and is evicted, as a whole: a turn
without the turns before it means something else. Each response belongs to one tenant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from afterglow.errors import StoreError
from afterglow.store.database import replies
from afterglow.store.database.connection import Schema, wal_share
from afterglow.store.database.conversation_file import ConversationFile, used_bytes
from afterglow.store.database.replies import StoredReplies, crc_of, to_json
from afterglow.store.places import remove

log = logging.getLogger("afterglow.store")
Item = dict[str, Any]

FILE: Final = "conversations.sqlite"
TTL_S: Final = 30 * 24 * 3600.0  # as OpenAI promises
MAX_BYTES: Final = 256 * 1024**2
MAX_DEPTH: Final = 10_000  # responses of one conversation
SWEEP_SECONDS: Final = 600.0

_SHM_BYTES: Final = 64 * 1024
_LARGEST: Final = 8  # a response may take this part of the file
# The fields that a conversation's responses share are in a table of their own: to write `expires` into each response
# again at every turn would mean to write their texts again.
_TABLES: Final = (
    "CREATE TABLE conversations (root TEXT PRIMARY KEY NOT NULL, expires REAL NOT NULL)",
    "CREATE INDEX by_expiry ON conversations (expires)",
    """
CREATE TABLE responses (
    id TEXT PRIMARY KEY NOT NULL, tenant TEXT NOT NULL, previous TEXT, root TEXT NOT NULL, created REAL NOT NULL,
    model TEXT NOT NULL, body TEXT NOT NULL, items TEXT NOT NULL, crc32c INTEGER NOT NULL
)""",
    "CREATE INDEX by_root ON responses (root)",
    "CREATE INDEX by_tenant ON responses (tenant)",
)
SCHEMA: Final = Schema(1, _TABLES, later=replies.TABLES)
_COLUMNS: Final = "r.id, r.tenant, r.previous, r.root, r.created, c.expires, r.model, r.body, r.items, r.crc32c"
_DUE: Final = "SELECT root FROM conversations WHERE expires <= ?"
_FROM: Final = "responses r JOIN conversations c ON c.root = r.root AND c.expires > ?"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response. `body` is the reply that the client got, `items` the input and then the output of this turn."""

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

    schema: ClassVar[Schema] = SCHEMA

    def __init__(
        self,
        folder: Path | None,
        *,
        ttl_s: float = TTL_S,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s`: how long after its last turn a conversation is kept. `max_bytes`: size of the file; beyond it the
        conversations that were not used for longest are dropped (`footprint`: with SQLite's files beside it)."""
        self.folder = folder
        self.file = ConversationFile(None if folder is None else folder / FILE, self.schema, max_bytes)
        self.replies = StoredReplies(self.file, ttl_s, lambda: self._clock())
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._swept = float("-inf")
        with contextlib.suppress(StoreError):
            self._drop_expired()

    @property
    def damaged(self) -> int:
        """Files that were begun anew, and rows that were dropped, because they were damaged."""
        return self.file.damaged

    def add(
        self,
        response: str,
        tenant: str,
        previous: str | None,
        model: str,
        body: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep a response; its whole conversation is in use again.

        Raises:
            StoreError: the disk is full, the id is taken, or this tenant has no `previous` (any more).
        """
        texts = (to_json(body), to_json(items))
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
            crc = crc_of(response, tenant, previous, root, now, model, *texts)
            row = (response, tenant, previous, root, now, model, *texts, crc)
            db.execute(
                "INSERT INTO conversations VALUES (?, ?) ON CONFLICT (root) DO UPDATE SET expires = excluded.expires",
                (root, now + self._ttl_s),
            )
            db.execute("INSERT INTO responses VALUES (?,?,?,?,?,?,?,?,?)", row)

        self.file.run(work)
        if self._clock() - self._swept >= SWEEP_SECONDS:
            self._drop_expired()

    def get(self, response: str, tenant: str) -> StoredResponse | None:
        """Find a response of this tenant; None for any other id, an expired one, and damage.

        Raises:
            StoreError: the file cannot be read.
        """
        return self.file.run(lambda db: self._find(db, response, tenant))

    def delete(self, response: str, tenant: str) -> bool:
        """Forget one response; the responses after it cannot be gone on from any more. False: there is none.

        Raises:
            StoreError: it cannot be deleted.
        """

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

        return self.file.run(work)

    def chain(self, response: str, tenant: str) -> list[Item] | None:
        """List the items up to and in a response, oldest first; None if it, or one before it, is not there (deleted, damaged,
        another tenant's, more than MAX_DEPTH).

        Raises:
            StoreError: the file cannot be read.
        """

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

        return self.file.run(work)

    def line(self, response: str, tenant: str, most: int) -> list[str]:
        """List the ids of a response and of those before it, as far as they are there, the latest first; at most `most`.

        Raises:
            StoreError: the file cannot be read.
        """

        def work(db: sqlite3.Connection) -> list[str]:
            found: list[str] = []
            at: str | None = response
            query = f"SELECT r.previous FROM {_FROM} WHERE r.id = ? AND r.tenant = ?"
            while at is not None and len(found) < most:
                try:
                    row = db.execute(query, (self._clock(), at, tenant)).fetchone()
                except UnicodeEncodeError:
                    break  # no response was ever stored under such an id
                if row is None:
                    break
                found.append(at)
                (at,) = row
            return found

        return self.file.run(work)

    def names(self, root: str, tenant: str) -> list[str]:
        """List the ids of all responses of a tenant's conversation, by the id of its first.

        Raises:
            StoreError: the file cannot be read.
        """
        query = "SELECT id FROM responses WHERE root = ? AND tenant = ?"
        return self.file.run(lambda db: [each for (each,) in db.execute(query, (root, tenant))])

    def copy(self, found: StoredResponse, tenant: str) -> None:
        """Take over a response that another engine has kept, if it has not expired and is not here.

        Raises:
            StoreError: it cannot be written.
        """
        texts = (to_json(found.body), to_json(found.items))
        self._make_room(sum(map(len, texts)), found.previous, tenant)
        row = (found.id, tenant, found.previous, found.root, found.created, found.model, *texts)

        def work(db: sqlite3.Connection) -> None:
            if found.expires > self._clock():
                db.execute(
                    "INSERT INTO conversations VALUES (?, ?) ON CONFLICT (root) DO UPDATE SET"
                    " expires = MAX(expires, excluded.expires)",
                    (found.root, found.expires),
                )
                db.execute("INSERT OR IGNORE INTO responses VALUES (?,?,?,?,?,?,?,?,?)", (*row, crc_of(*row)))

        self.file.run(work)

    def count(self, tenant: str) -> tuple[int, int]:
        """Count a tenant's responses, and the bytes of their text.

        Raises:
            StoreError: the file cannot be read.
        """

        def work(db: sqlite3.Connection) -> tuple[int, int]:
            sizes = "COUNT(*), COALESCE(SUM(LENGTH(body) + LENGTH(items)), 0)"
            number, size = db.execute(
                f"SELECT {sizes} FROM {_FROM} WHERE r.tenant = ?", (self._clock(), tenant)
            ).fetchone()
            return int(number), int(size)

        return self.file.run(work)

    def sweep(self) -> int:
        """Drop conversations and replies that have expired; return the number of responses.

        Raises:
            StoreError: they cannot be deleted.
        """
        return self._drop_expired()

    def _drop_expired(self) -> int:
        """Drop what has expired from the file; return the number of responses. Raises: StoreError."""
        self._swept = self._clock()
        gone = 0
        while some := self.file.run(lambda db: self._drop_some(db, f"root IN ({_DUE})", self._swept)):
            gone += some
        self.file.run(lambda db: db.execute("DELETE FROM conversations WHERE expires <= ?", (self._swept,)))
        self.replies.drop_expired(self._swept)
        return gone

    def close(self) -> None:
        """Close the file; may be called twice."""
        self.file.close()

    def _find(self, db: sqlite3.Connection, response: str, tenant: str) -> StoredResponse | None:
        query = f"SELECT {_COLUMNS} FROM {_FROM} WHERE r.id = ? AND r.tenant = ?"
        try:
            row = db.execute(query, (self._clock(), response, tenant)).fetchone()
            return None if row is None else _stored(row)
        except UnicodeEncodeError:
            return None  # an id that is no Unicode text: no response was ever stored under it
        except (ValueError, TypeError, sqlite3.OperationalError) as error:
            if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error).lower():
                raise  # (bytes that are no UTF-8 are reported in this way)
            log.warning("response %s is damaged and is forgotten: %s", response, error)
            self.file.damaged += 1
            db.execute("DELETE FROM responses WHERE id = ?", (response,))
            return None

    def _make_room(self, size: int, previous: str | None, tenant: str) -> None:
        """Drop conversations, the longest unused first, until a response of `size` bytes fits.

        Raises:
            StoreError: they cannot be deleted, or one alone is too large.
        """
        need = size + size // 256 + 4 * 4096  # its pages, and those of the indices

        def work(db: sqlite3.Connection) -> bool:
            if used_bytes(db) + need <= self._max_bytes:
                return False
            before = None if previous is None else self._find(db, previous, tenant)
            keep = "" if before is None else before.root
            oldest = db.execute(
                "SELECT rowid, root FROM conversations WHERE root != ? ORDER BY expires, root LIMIT 1", (keep,)
            ).fetchone()
            if oldest is None:
                raise StoreError(f"conversations: one alone is larger than {self._max_bytes} bytes")
            row, root = oldest
            # The conversation has expired from now on, so that no reader sees a part.
            db.execute("UPDATE conversations SET expires = ? WHERE rowid = ?", (float("-inf"), row))
            if not self._drop_some(db, "root = ?", root):
                _delete(db, "conversations", row)
            return True

        while self.file.run(work):
            pass

    def _drop_some(self, db: sqlite3.Connection, which: str, *values: object) -> int:
        """Delete some responses, few enough for one transaction: wiped pages pass through the write-ahead log."""
        found = db.execute(f"SELECT rowid, LENGTH(body) + LENGTH(items) FROM responses WHERE {which} LIMIT 64", values)
        left, gone = self.file.wal_bytes // 2, 0
        for row, size in found.fetchall():
            left -= size or 0
            if left < 0 and gone:
                break
            _delete(db, "responses", row)
            gone += 1
        return gone


def _delete(db: sqlite3.Connection, table: str, row: int) -> None:
    """Delete a row by its number: a damaged key would not be found, and read again and again.

    Raises:
        sqlite3.DatabaseError: the row cannot be found again, so the file is damaged.
    """
    if not db.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,)).rowcount:
        raise sqlite3.DatabaseError(f"row {row} of {table} was read, and is not found to be deleted")


def footprint(max_bytes: int) -> int:
    """Compute the bytes that the file and SQLite's files beside it take at most."""
    return max_bytes + max_bytes // _LARGEST + 2 * wal_share(max_bytes) + _SHM_BYTES


def erase(folder: Path) -> None:
    """Remove the file of a namespace that no process has open.

    Raises:
        OSError: it cannot be removed.
    """
    for file in folder.glob(f"{FILE}*"):
        remove(file)


def _stored(row: tuple[Any, ...]) -> StoredResponse:
    """Make a response of a row.

    Raises:
        ValueError, TypeError: the row is damaged (SQLite's pages have no checksums).
    """
    response, tenant, previous, root, created, expires, model, body, items, crc = row
    if crc_of(response, tenant, previous, root, created, model, body, items) != crc:
        raise ValueError("wrong checksum")
    return StoredResponse(response, previous, root, created, expires, model, json.loads(body), json.loads(items))
