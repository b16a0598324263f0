"""Opening a catalog so that it tells the truth: rows and files are compared, and what is unreadable is
rebuilt.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.catalog import Catalog, aside, create
from afterglow.store.disk import SUFFIX, DiskTier

log = logging.getLogger("afterglow.store")


@dataclass(frozen=True, slots=True)
class Opened:
    """A catalog whose rows all have files. `orphans`: files without a row, to be swept. `rebuilt`: 0 or 1."""

    catalog: Catalog
    records: list[ExtentRecord]
    orphans: list[str]
    rebuilt: int


def open_catalog(path: Path, disk: DiskTier) -> Opened:
    """Open the catalog of a locked namespace, rebuilding it from the extents where it cannot be read.

    Raises StoreError when the folder cannot be read or written.
    """
    rebuilt = 0
    try:
        if lost(path, disk):
            raise DamageError(f"{path} is missing")
        catalog = Catalog(path)
        rows = catalog.load()
    except DamageError as error:
        log.warning("the catalog cannot be read and is rebuilt from the extents: %s", error)
        rebuild(path, disk)
        rebuilt = 1
        catalog = Catalog(path)
        rows = catalog.load()
    files = dict.fromkeys(disk.extents())
    records, gone = [], []
    for extent, record in rows:
        if extent not in files:
            gone.append(extent)
            continue
        if record is None:  # the row is damaged, its extent perhaps not
            record = salvage(disk, extent)
            if record is None:
                gone.append(extent)
                continue
            catalog.add(record, file_name(extent))
        records.append(record)
        del files[extent]
    if gone:
        log.info("removed %d rows without a readable file from the catalog", len(gone))
        catalog.remove(gone)
    return Opened(catalog, records, list(files), rebuilt)


def lost(path: Path, disk: DiskTier) -> bool:
    """Whether there is no catalog although there are extents."""
    gone = not path.exists() or (path.is_file() and path.stat().st_size == 0)
    return gone and next(disk.extents(), None) is not None


def rebuild(path: Path, disk: DiskTier) -> int:
    """Set a catalog aside and make a new one from the heads of the extents; returns its rows.

    Lost are the times and counts of use, and all notes: nothing else holds them. Raises StoreError when the new one cannot be written.
    """
    try:
        aside(path)
        records = list(_salvage_all(disk))
        create(path, records, file_name)
        return len(records)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the catalog {path} cannot be rebuilt: {error}") from error


def salvage(disk: DiskTier, extent: str) -> ExtentRecord | None:
    """The record of an extent as its file tells it (hits 0, last used when written); None: unreadable."""
    try:
        record = disk.head(extent).record
        return replace(record, last_used=disk.path(extent).stat().st_mtime)
    except (StoreError, OSError) as error:
        log.warning("an extent is not taken over: %s", error)
        return None


def file_name(extent: str) -> str:
    """The name of an extent's file, as the catalog has it: relative to the folder of the extents."""
    return f"{extent[:2]}/{extent}{SUFFIX}"


def _salvage_all(disk: DiskTier) -> Iterator[ExtentRecord]:
    for extent in disk.extents():
        record = salvage(disk, extent)
        if record is not None:
            yield record
