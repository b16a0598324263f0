"""Replies to clients that send their conversations back themselves, so that the tokens of a reply are known again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final

from afterglow.store.database.conversation_file import ConversationFile, used_bytes
from afterglow.store.extents.head import crc32c

# `chain` names the conversation that a reply answered, `salt` and `session` whose it is.
TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS replies (
    chain TEXT PRIMARY KEY NOT NULL, salt TEXT NOT NULL, session TEXT, expires REAL NOT NULL, body TEXT NOT NULL,
    crc32c INTEGER NOT NULL
)""",
    "CREATE INDEX IF NOT EXISTS replies_by_expiry ON replies (expires)",
    "CREATE INDEX IF NOT EXISTS replies_by_owner ON replies (salt, session)",
)
MAX_REPLIES: Final = 16_384

Reply = tuple[str, str, dict[str, Any], str | None, float]  # chain, salt, body, session, when it expires


class StoredReplies:
    """The replies in a file of conversations, whose first half is for them."""

    def __init__(self, file: ConversationFile, ttl_s: float, clock: Callable[[], float]) -> None:
        """`ttl_s`: how long a reply is kept at most."""
        self._file = file
        self._ttl_s = ttl_s
        self._clock = clock

    def keep(
        self,
        chain: str,
        salt: str,
        session: str | None,
        body: Mapping[str, Any],
        ends: float = inf,
        before: Sequence[str] = (),
    ) -> None:
        """Keep a reply, and those `before` it in its conversation, until `ends`, and no longer than `ttl_s`. At most MAX_REPLIES
        are kept: those that expire first make room.

        Raises:
            StoreError: it cannot be written.
        """
        text = to_json(body)
        expires = min(self._clock() + self._ttl_s, ends)
        room = self._file.max_bytes // 2

        def work(db: sqlite3.Connection) -> None:
            (number,) = db.execute("SELECT COUNT(*) FROM replies").fetchone()
            while number and (number >= MAX_REPLIES or used_bytes(db) + len(text) > room):
                some = min(number, 16)
                db.execute(
                    "DELETE FROM replies WHERE chain IN (SELECT chain FROM replies ORDER BY expires LIMIT ?)", (some,)
                )
                number -= some
            if used_bytes(db) + len(text) <= room:
                row = (chain, salt, session, expires, text, crc_of(chain, salt, session, text))
                db.execute("INSERT OR REPLACE INTO replies VALUES (?,?,?,?,?,?)", row)
            later = [(expires, each, expires) for each in before]
            db.executemany("UPDATE replies SET expires = ? WHERE chain = ? AND expires < ?", later)

        self._file.run(work)

    def all(self) -> list[Reply]:
        """List all replies, those that expire first at the beginning; damaged ones are left out.

        Raises:
            StoreError: they cannot be read.
        """

        def work(db: sqlite3.Connection) -> list[Reply]:
            found, bad = [], []
            query = "SELECT chain, salt, session, body, crc32c, expires FROM replies WHERE expires > ? ORDER BY expires"
            for chain, salt, session, body, crc, expires in db.execute(query, (self._clock(),)):
                if crc_of(chain, salt, session, body) == crc:
                    found.append((chain, salt, json.loads(body), session, float(expires)))
                else:
                    bad.append(chain)
            self._file.damaged += len(bad)
            db.executemany("DELETE FROM replies WHERE chain = ?", [(chain,) for chain in bad])
            return found

        return self._file.run(work)

    def salts(self) -> list[str]:
        """List the salts under which there are replies.

        Raises:
            StoreError: they cannot be read.
        """
        return self._file.run(lambda db: [salt for (salt,) in db.execute("SELECT DISTINCT salt FROM replies")])

    def forget(self, salts: Sequence[str] | None = None, session: str | None = None) -> int:
        """Forget the replies under these salts (None: all), of one conversation or of any. Returns their number.

        Raises:
            StoreError: they cannot be deleted.
        """

        def work(db: sqlite3.Connection) -> int:
            if salts is None:
                return db.execute("DELETE FROM replies").rowcount
            values = [(salt, session, session) for salt in salts]
            return db.executemany("DELETE FROM replies WHERE salt = ? AND (? IS NULL OR session = ?)", values).rowcount

        return max(0, self._file.run(work))

    def forget_tenant(self, tenant: str) -> None:
        """Forget the replies under all salts of a tenant (TENANT/SALT).

        Raises:
            StoreError: they cannot be deleted.
        """
        start = f"{tenant}/"
        self._file.run(lambda db: db.execute("DELETE FROM replies WHERE substr(salt, 1, ?) = ?", (len(start), start)))

    def drop_expired(self, now: float) -> None:
        """Delete the replies that have expired.

        Raises:
            StoreError: they cannot be deleted.
        """
        self._file.run(lambda db: db.execute("DELETE FROM replies WHERE expires <= ?", (now,)))


def crc_of(*values: object) -> int:
    """Compute the checksum of a row's values."""
    return crc32c(repr(values).encode("utf-8", "backslashreplace"))


def to_json(value: object) -> str:
    """Write JSON in ASCII, so that a lone surrogate of a client's JSON can be stored."""
    return json.dumps(value, separators=(",", ":"))
