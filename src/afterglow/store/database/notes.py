"""Durable notes: small texts by kind and key, in a table of the catalog beside the extents. Knows SQL, no threads.

Their owners alone know their meaning, and must be able to do without them: only the catalog holds them. Unlike extents
they cannot be read back from anywhere, so a row whose checksum is wrong is dropped.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from afterglow.store.extents.head import crc32c

NOTES_MOST: Final = 65_536  # of each kind
VALUE_MOST: Final = 64 * 1024  # bytes of one value

IMPORTANCE: Final = "importance"  # the kind whose notes go first: a cache works nearly as well without them

Note = tuple[str, str]  # kind, key
Writes = OrderedDict[str, str | None]  # of one kind: key -> value, None deletes; the newest note is last

# `used` orders notes by when they were last written: SQLite gives each new row a higher number than all others have.
# Texts are kept as bytes: a caller's text may hold half a surrogate pair, and a damaged one must not stop a SELECT.
TABLE: Final = """
CREATE TABLE IF NOT EXISTS notes (
    kind BLOB NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, used INTEGER PRIMARY KEY, crc32c INTEGER NOT NULL,
    UNIQUE (kind, key)
)"""
_SELECT: Final = (
    "SELECT used, CAST(kind AS BLOB), CAST(key AS BLOB), CAST(value AS BLOB), CAST(crc32c AS INTEGER) FROM notes"
)


@dataclass(frozen=True, slots=True)
class NoteTotals:
    """Counts the notes of each kind, and the bytes that all take in the file, at most."""

    counts: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0


def read(db: sqlite3.Connection) -> Iterator[tuple[int, Note, str | None]]:
    """Yield all notes as (row, (kind, key), value), in the order of writing; the value of a damaged row is None.

    Yields nothing where there is no table.

    Raises:
        sqlite3.Error: SQLite cannot read the table.
    """
    if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'notes'").fetchone():
        return
    for row, kind, key, value, crc in db.execute(f"{_SELECT} ORDER BY used"):
        if None in (row, kind, key, value, crc):
            raise sqlite3.DatabaseError("the table of notes has columns that are empty: it is another's")
        try:
            sound = _crc(kind, key, value) == crc
            yield row, (_text(kind), _text(key)), _text(value) if sound else None
        except UnicodeDecodeError:
            yield row, ("", ""), None


def forget(db: sqlite3.Connection, rows: Iterable[int]) -> None:
    """Remove rows by number.

    Raises:
        sqlite3.Error: SQLite cannot write the table.
    """
    db.executemany("DELETE FROM notes WHERE used = ?", [(row,) for row in rows])


def write(db: sqlite3.Connection, noted: Mapping[str, Writes], totals: NoteTotals, most_bytes: int) -> NoteTotals:
    """Write notes by kind; remove the oldest of a kind that has too many, and while all notes take more than `most_bytes` the
    oldest about importance, or where there is none, the oldest of all.

    `totals`: the totals before. Returns those afterwards; they are true once the transaction is committed.

    Raises:
        sqlite3.Error: SQLite cannot write the table.
    """
    counts, total = dict(totals.counts), totals.bytes

    def remove(where: str, *values: object) -> str | None:
        nonlocal total
        for raw, key_bytes, value_bytes in db.execute(
            f"DELETE FROM notes WHERE {where} RETURNING kind, LENGTH(key), LENGTH(value)", values
        ).fetchall():
            kind = _text(raw)
            counts[kind] = counts.get(kind, 0) - 1
            total -= _cost(len(raw) + key_bytes, value_bytes)
            return kind
        return None

    for kind, writes in noted.items():
        for key, value in writes.items():
            named = (_bytes(kind), _bytes(key))
            remove("kind = ? AND key = ?", *named)
            if value is not None:
                row = (*named, _bytes(value))
                db.execute("INSERT INTO notes (kind, key, value, crc32c) VALUES (?, ?, ?, ?)", (*row, _crc(*row)))
                counts[kind] = counts.get(kind, 0) + 1
                total += cost(kind, key, value)
                if counts[kind] > NOTES_MOST:
                    remove("used = (SELECT used FROM notes WHERE kind = ? ORDER BY used LIMIT 1)", named[0])
                while total > most_bytes and (
                    remove("used = (SELECT MIN(used) FROM notes WHERE kind = ?)", _bytes(IMPORTANCE)) is not None
                    or remove("used = (SELECT MIN(used) FROM notes)") is not None
                ):
                    pass
    return NoteTotals(counts, max(0, total))


def cost(kind: str, key: str, value: str) -> int:
    """Compute the bytes that a note takes in the file, at most."""
    return _cost(len(_bytes(kind)) + len(_bytes(key)), len(_bytes(value)))


def _cost(name_bytes: int, value_bytes: int) -> int:
    # The name is in the table and in the index, whose pages may be half empty; a long value has pages of its own.
    return 128 + 4 * name_bytes + 2 * min(value_bytes, 1024) + (value_bytes + 4096 if value_bytes > 1024 else 0)


def _crc(kind: bytes, key: bytes, value: bytes) -> int:
    return crc32c(repr((kind, key)).encode() + value)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
