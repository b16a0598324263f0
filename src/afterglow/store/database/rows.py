"""The rows of the catalog, one per extent: records to SQL and back. Knows no threads.

SQLite has no page checksums, and a token that changes in the catalog would let a prompt match keys that belong to another
prompt. So each row carries a checksum of what never changes in it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final, get_args

from afterglow.plan.step import ExtentRecord, Kind, Use
from afterglow.store.extents.head import crc32c

NO_NAMES: Final[Mapping[str, str]] = {}

_KINDS: Final = frozenset(get_args(Kind))
_COLUMNS: Final = "id, parent, parent_rows, salt, kind, tokens, rows, file, bytes, last_used, hits, crc32c, expires"
TABLE: Final = """
CREATE TABLE extents (
    id TEXT PRIMARY KEY NOT NULL, parent TEXT, parent_rows INTEGER NOT NULL, salt TEXT NOT NULL,
    kind TEXT NOT NULL, tokens BLOB NOT NULL, rows INTEGER NOT NULL,
    file TEXT NOT NULL, bytes INTEGER NOT NULL,
    last_used REAL NOT NULL, hits INTEGER NOT NULL, crc32c INTEGER NOT NULL, expires REAL
)"""


def add_expiry(db: sqlite3.Connection) -> None:
    """Add the last column where it is missing: older programs made the table without it, and leave it empty.

    Raises:
        sqlite3.Error: the table cannot be altered.
    """
    if not _has_expiry(db):
        db.execute("ALTER TABLE extents ADD COLUMN expires REAL")


def read_rows(
    db: sqlite3.Connection, names: Mapping[str, str] = NO_NAMES, ordered: bool = True
) -> Iterator[tuple[str, ExtentRecord | None]]:
    """Yield all rows as (id, record), least recently used first if `ordered`; None in place of a record whose row is damaged.

    Values that occur again and again are one object: salts, sizes, times; ids, if they are among `names` (each by itself).

    Raises:
        sqlite3.Error: the file cannot be read.
    """
    same: dict[Any, Any] = {}
    times: dict[float, float] = {}  # apart: 64.0 is 64, and would come back as that
    columns = _COLUMNS if _has_expiry(db) else _COLUMNS.replace("expires", "NULL")
    for row in db.execute(f"SELECT {columns} FROM extents{' ORDER BY last_used, id' if ordered else ''}"):
        record = _record(row, names, same, times)
        yield (record.id if record is not None else str(row[0])), record


def insert(db: sqlite3.Connection, record: ExtentRecord, file: str) -> None:
    """Enter an extent, or replace its row.

    Raises:
        sqlite3.Error: the row cannot be written.
    """
    own, stored = (record.id, record.parent, record.parent_rows, record.salt, record.kind), (file, record.file_bytes)
    use, crc = (record.last_used, record.hits), _row_crc(own + stored, record.tokens)
    values = (*own, record.tokens, record.rows, *stored, *use, crc, _end(record.expires))
    db.execute(f"INSERT OR REPLACE INTO extents ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", values)


def delete(db: sqlite3.Connection, extents: Iterable[str]) -> int:
    """Remove the rows of some extents; return the number of removed rows.

    Raises:
        sqlite3.Error: they cannot be removed.
    """
    return db.executemany("DELETE FROM extents WHERE id = ?", [(extent,) for extent in extents]).rowcount


def update_uses(db: sqlite3.Connection, uses: Sequence[Use]) -> None:
    """Enter when and how often extents were used, and how long they are kept.

    Raises:
        sqlite3.Error: the rows cannot be written.
    """
    changes = [(use.last_used, use.hits, _end(use.expires), use.extent) for use in uses]
    db.executemany("UPDATE extents SET last_used = ?, hits = ?, expires = ? WHERE id = ?", changes)


def _has_expiry(db: sqlite3.Connection) -> bool:
    return any(column[1] == "expires" for column in db.execute("PRAGMA table_info(extents)"))


def _end(expires: float) -> float | None:
    return expires if expires < inf else None


def _row_crc(names: tuple[Any, ...], tokens: bytes) -> int:
    """Compute the checksum of a row. `names`: id, parent, parent_rows, salt, kind, file, bytes."""
    return crc32c(repr(names).encode() + tokens)


def _record(
    row: tuple[Any, ...], names: Mapping[str, str], same: dict[Any, Any], times: dict[float, float]
) -> ExtentRecord | None:
    """Make a record of a row of `_COLUMNS`; None: it is damaged. A value in one of the three mappings is not made twice."""
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
