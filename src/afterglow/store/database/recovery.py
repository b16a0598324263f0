"""Opening a catalog so that it tells the truth: rows are compared with files, and an unreadable catalog is rebuilt."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.database.catalog import Catalog, CatalogShares, open_tables
from afterglow.store.database.connection import aside
from afterglow.store.database.rows import insert
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.extents.extent_folder import SUFFIX
from afterglow.store.places import kind_at

log = logging.getLogger("afterglow.store")

Rows = Sequence[ExtentRecord | str]


@dataclass(frozen=True, slots=True)
class Opened:
    """A catalog whose rows all have files; records come least recently used first. `orphans`: files without a row, to be
    swept. `rebuilt`: 0 or 1; `damaged` rows were read from their extents, or went with them; `missing` ones had no file.
    """

    catalog: Catalog
    records: list[ExtentRecord]
    orphans: list[str]
    rebuilt: int
    damaged: int
    missing: int


def open_catalog(path: Path, disk: DiskTier, shares: CatalogShares | None = None) -> Opened:
    """Open the catalog of a locked namespace, rebuilding it from the extents where it cannot be read.

    Raises StoreError when the folder cannot be read or written.
    """
    try:
        if lost(path, disk):
            raise DamageError(f"{path} is missing")
        return _open(path, disk, shares, rebuilt=0)
    except DamageError as error:
        log.warning("the catalog cannot be read and is rebuilt from the extents: %s", error)
        rebuild(path, disk)
        return _open(path, disk, shares, rebuilt=1)


def _open(path: Path, disk: DiskTier, shares: CatalogShares | None, rebuilt: int) -> Opened:
    """Open a catalog that is there, and compare it with the files. Raises: DamageError, StoreError."""
    files = {extent: extent for extent in disk.extents()}  # before the rows, which then need no strings of their own
    catalog = Catalog(path, shares)
    rows = catalog.load(files)
    try:
        return _compare(catalog, rows, files, disk, rebuilt)
    except BaseException:
        catalog.close()
        raise


def _compare(catalog: Catalog, rows: Rows, files: dict[str, str], disk: DiskTier, rebuilt: int) -> Opened:
    records: list[ExtentRecord] = []
    gone: list[str] = []
    damaged = missing = 0
    for row in rows:
        extent, record = (row, None) if isinstance(row, str) else (row.id, row)
        if extent not in files:
            missing += 1
            gone.append(extent)
            continue
        if record is None:  # the row is damaged, its extent perhaps not
            damaged += 1
            record = salvage(disk, extent)
            if record is None:
                gone.append(extent)
                continue
            with contextlib.suppress(StoreError):  # a full disk can be read; it is damaged at the next start, too
                catalog.add(record, file_name(extent))
        records.append(record)
        del files[extent]
    if gone:
        log.warning("%d extents are lost: their files are gone or cannot be read", len(gone))
        removed = len(gone)
        with contextlib.suppress(StoreError):
            removed = catalog.remove(gone)
        if removed < len(gone):
            raise DamageError(f"{len(gone) - removed} rows that were read are not found to be removed")
    records.sort(key=attrgetter("last_used"))
    return Opened(catalog, records, list(files), rebuilt, damaged, missing)


def lost(path: Path, disk: DiskTier) -> bool:
    """Whether there is no catalog although there are extents."""
    found = kind_at(path)
    gone = found == "absent" or (found == "file" and path.lstat().st_size == 0)
    return gone and next(disk.extents(), None) is not None


def rebuild(path: Path, disk: DiskTier) -> int:
    """Make a new catalog from the heads of the extents and set the old one aside; returns its rows.

    Lost are the times and counts of use, and all notes: nothing else holds them. Raises StoreError when the new one
    cannot be written; the old one is where it was then.
    """
    try:
        records = [record for extent in disk.extents() if (record := salvage(disk, extent)) is not None]
        create(path, records, file_name)
        return len(records)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the catalog {path} cannot be rebuilt: {error}") from error


def create(path: Path, records: Iterable[ExtentRecord], file_of: Callable[[str], str]) -> None:
    """Make a new catalog with these rows, and put it in the place of the file at `path`, which is set aside then.

    Raises:
        OSError, sqlite3.Error: it cannot be written; then nothing has changed.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        # Half a catalog is of no use, so there is no journal, nor a log that would have to be moved along.
        with closing(open_tables(new, journal="OFF")) as db:
            db.execute("BEGIN")
            for record in records:
                insert(db, record, file_of(record.id))
            db.execute("COMMIT")
        aside(path)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def salvage(disk: DiskTier, extent: str) -> ExtentRecord | None:
    """The record of an extent as its file tells it (hits 0, last used when written); None: unreadable."""
    try:
        record = disk.head(extent).record
        return replace(record, last_used=disk.path(extent).lstat().st_mtime)
    except (StoreError, OSError) as error:
        log.warning("an extent is not taken over: %s", error)
        return None


def file_name(extent: str) -> str:
    """The name of an extent's file, as the catalog has it: relative to the folder of the extents."""
    return f"{extent[:2]}/{extent}{SUFFIX}"
