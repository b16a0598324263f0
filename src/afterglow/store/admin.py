"""Maintenance of a cache directory without an engine: list, count, check, repair, clear. For the command line.

Functions that only read work beside a process that serves the namespace. Functions that write take the namespace's lock;
their error names the process that holds it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from afterglow.errors import ConfigError, DamageError, StoreError
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.step import ExtentRecord
from afterglow.store.database import notes, recovery
from afterglow.store.database.catalog import Catalog
from afterglow.store.database.connection import failure, read_only
from afterglow.store.database.rows import read_rows
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.namespace.namespace import (
    CATALOG,
    EXTENTS,
    Description,
    Holder,
    Namespace,
    holder,
    is_namespace,
    read_description,
)
from afterglow.store.places import bytes_below, kind_at, remove

SETTLE_SECONDS: Final = 0.3  # a live server may be between a file and its row

ProblemKind = Literal["damaged", "missing", "orphan", "row", "differs", "id", "catalog", "leftover", "note"]
NameOf = Callable[[str, str, bytes, bytes], str]  # of (digest, salt, tokens before, own tokens)
Rows = dict[str, ExtentRecord | None]


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """Describes a namespace in a list. `problem`: why it cannot be read (`description` is None then)."""

    path: Path
    description: Description | None
    problem: str | None
    holder: Holder | None
    extents: int
    rows: int
    hits: int
    bytes: int  # of every file in the folder
    last_used: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """Names one fault. Its kind decides what a repair does:

    damaged, id (contents do not have the name's hash): the extent is dropped.
    missing (a row without a file): the row is dropped.
    orphan (a file without a row), leftover (any other file): the file is dropped.
    row, differs (a row that is damaged, or contradicts the file): the row is written anew.
    note (a note that is damaged): the note is dropped.
    catalog (unreadable): rebuilt from the extents, without notes.
    """

    kind: ProblemKind
    name: str  # extent id, file name, or the number of a note
    detail: str


@dataclass(slots=True)
class Report:
    """Holds the findings of a check. `repaired`: every problem was dealt with."""

    path: Path
    extents: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    repaired: bool = False

    @property
    def ok(self) -> bool:
        """Tell whether the namespace is sound now."""
        return not self.problems or self.repaired


def list_namespaces(cache_dir: Path, left_out: Callable[[Path, OSError], None]) -> list[NamespaceInfo]:
    """List every namespace under a cache directory, by name; those of other versions with their problem.

    `left_out` is called for an entry that cannot be looked at, such as another user's namespace.

    Raises:
        ConfigError: the cache directory cannot be read.
    """
    try:
        entries = sorted(cache_dir.iterdir()) if cache_dir.is_dir() else []
    except OSError as error:
        raise ConfigError(f"the cache directory {cache_dir} cannot be read: {error.strerror}") from error
    found = []
    for path in entries:
        try:
            if is_namespace(path):
                found.append(stats(path))
        except OSError as error:
            left_out(path, error)
    return found


def stats(path: Path) -> NamespaceInfo:
    """Return figures of the namespace in the folder `path`; an unreadable one is reported, not raised."""
    description, problem, records = None, None, []
    try:
        description = read_description(path)
        records = list_extents(path)
    except (ConfigError, StoreError) as error:
        problem = str(error)
    return NamespaceInfo(
        path=path,
        description=description,
        problem=problem,
        holder=holder(path),
        extents=len(records),
        rows=sum(record.rows for record in records),
        hits=sum(record.hits for record in records),
        bytes=bytes_below(path),
        last_used=max((record.last_used for record in records), default=None),
    )


def list_extents(path: Path) -> list[ExtentRecord]:
    """Return the catalog's records, least recently used first.

    Raises:
        DamageError: the catalog cannot be read.
        ConfigError: there is no namespace of this version.
    """
    rows = _rows(path, _tier(path, read_description(path)))
    return [record for record in rows.values() if record is not None]


def registered_prompts(path: Path) -> dict[str, str]:
    """Return the extents on disk that hold rows of registered prefixes (see `plan.retention.registered`): id -> prefix."""
    found: dict[str, str] = {}
    try:
        records = {record.id: record for record in list_extents(path)}
        with closing(read_only(path / CATALOG)) as db:
            texts = [value for _, (kind, _), value in notes.read(db) if kind == "prefix" and value is not None]
        for text in texts:
            _, name, last, *_ = json.loads(text)
            while last in records:
                found[last] = name
                last = records[last].parent
    except (sqlite3.Error, ValueError, TypeError, OSError, ConfigError, StoreError):
        return found  # it is for show
    return found


def check(
    path: Path,
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
    name_of: NameOf = extent_id,
) -> Report:
    """Read every byte of a namespace and compare files, checksums, names and catalog.

    `progress(done, total)` counts extents. `repair` mends all problems found (see `Problem`).

    Raises:
        ConfigError: there is no namespace of this version, or `repair` meets a process that holds it.
        StoreError: the description is damaged, or a repair cannot write.
    """
    if not repair:
        return _check(path, read_description(path), progress, name_of, live=holder(path) is not None)
    with Namespace.open_existing(path) as namespace:
        report = _check(path, namespace.description, progress, name_of, live=False)
        if report.problems:
            _repair(namespace, report.problems)
            report.repaired = True
        return report


def clear(path: Path) -> int:
    """Remove all extents and notes of a namespace; return the bytes freed.

    Raises:
        ConfigError: there is no namespace of this version, or a process holds it.
        StoreError: the description is damaged, or a file cannot be removed.
    """
    with Namespace.open_existing(path) as namespace:
        before = bytes_below(path)
        try:
            # The catalog first: a crash half-way leaves files without rows, which are swept at the next
            # start.
            for file in path.glob(f"{CATALOG}*"):
                remove(file)
            if kind_at(namespace.extents) == "folder":
                for entry in namespace.extents.iterdir():
                    remove(entry)
            else:
                remove(namespace.extents)
        except OSError as error:
            raise StoreError(f"cannot clear {path}: {error.strerror}") from error
        return before - bytes_below(path)


# ----------------------------------------------------------------------------------------------------------


def _rows(path: Path, disk: DiskTier) -> Rows:
    if recovery.lost(path / CATALOG, disk):
        raise DamageError(f"{path / CATALOG} is missing")
    if kind_at(path / CATALOG) == "absent":
        return {}
    try:
        with closing(read_only(path / CATALOG)) as db:
            return dict(read_rows(db))
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise failure(path / CATALOG, error) from error


def _tier(path: Path, description: Description) -> DiskTier:
    return DiskTier(path / EXTENTS, description.layout, description.digest, inspect=True)


def _check(
    path: Path,
    description: Description,
    progress: Callable[[int, int], None] | None,
    name_of: NameOf,
    *,
    live: bool,
) -> Report:
    report = Report(path)
    disk = _tier(path, description)
    files = sorted(disk.extents())  # before the rows: an extent stored meanwhile has a row by then
    rows: Rows | None = None
    try:
        rows = _rows(path, disk)
    except DamageError as error:
        report.problems.append(Problem("catalog", CATALOG, str(error)))
    if rows is not None:
        report.problems += [*_pairs(path, disk, files, rows, live), *_notes(path)]
    name = partial(_name, digest=description.digest, rows=rows or {}, name_of=name_of)
    unpaired = {problem.name for problem in report.problems if problem.kind == "orphan"}
    for done, extent in enumerate(files):
        if progress is not None:
            progress(done, len(files))
        if extent not in unpaired:
            report.problems += _contents(disk, extent, rows, name, live, report)
    if progress is not None:
        progress(len(files), len(files))
    if not live:
        report.problems += [
            Problem("leftover", file.name, "no extent, or in the wrong place") for file in disk.folder.leftovers()
        ]
    return report


def _there_is(disk: DiskTier, extent: str) -> bool:
    return kind_at(disk.path(extent)) == "file"


def _pairs(path: Path, disk: DiskTier, files: list[str], rows: Rows, live: bool) -> Iterator[Problem]:
    """Yield files without rows and rows without files."""
    there = set(files)
    alone = [extent for extent in files if extent not in rows]
    gone = [extent for extent in rows if extent not in there and not _there_is(disk, extent)]
    if live and (alone or gone):
        time.sleep(SETTLE_SECONDS)
        rows = _rows(path, disk)
        alone = [extent for extent in alone if extent not in rows and _there_is(disk, extent)]
        gone = [extent for extent in gone if extent in rows and not _there_is(disk, extent)]
    yield from (Problem("orphan", extent, "a file without a row in the catalog") for extent in alone)
    yield from (Problem("missing", extent, "a row in the catalog without a file") for extent in gone)


def _notes(path: Path) -> Iterator[Problem]:
    """Yield damaged notes."""
    if kind_at(path / CATALOG) == "absent":
        return
    try:
        with closing(read_only(path / CATALOG)) as db:
            bad = [row for row, _, value in notes.read(db) if value is None]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not isinstance(wrong := failure(path / CATALOG, error), DamageError):
            raise wrong from error
        yield Problem("catalog", CATALOG, str(error))
        return
    yield from (Problem("note", str(row), "its checksum is wrong") for row in bad)


def _name(record: ExtentRecord, digest: str, rows: Rows, name_of: NameOf) -> str | None:
    """Compute the name that an extent should have: a hash of all that its bytes depend on, the tokens before included. None where
    a row on the way to the first token is missing or damaged: no request can match such an extent.
    """
    pieces: list[bytes] = []
    at = record
    while at.parent is not None:
        parent = rows.get(at.parent)
        if parent is None or len(pieces) > len(rows):
            return None
        pieces.append(parent.tokens[: 4 * at.parent_rows])
        at = parent
    return name_of(digest, record.salt, b"".join(reversed(pieces)), record.tokens)


def _contents(
    disk: DiskTier,
    extent: str,
    rows: Rows | None,
    name: Callable[[ExtentRecord], str | None],
    live: bool,
    report: Report,
) -> Iterator[Problem]:
    """Yield the problems inside one extent, or between the extent and its row."""
    try:
        found = disk.verify(extent).record
    except StoreError as error:
        if not (live and not _there_is(disk, extent)):  # dropped by the server meanwhile
            yield Problem("damaged", extent, str(error))
        return
    report.extents += 1
    report.bytes += found.file_bytes
    if name(found) not in (extent, None):
        yield Problem("id", extent, "its name is not the hash of its contents")
    if rows is None or extent not in rows:
        return
    row = rows[extent]
    if row is None:
        yield Problem("row", extent, "its row in the catalog is damaged")
    elif replace(row, last_used=0.0, hits=0, expires=found.expires) != found:  # which uses have put off since
        yield Problem("differs", extent, "its row in the catalog is not what the file says")


def _repair(namespace: Namespace, problems: list[Problem]) -> None:
    """Deal with each problem; the lock is held."""
    disk = DiskTier(namespace.extents, namespace.description.layout, namespace.description.digest)
    disk.folder.clean()
    bad = [problem.name for problem in problems if problem.kind in ("damaged", "id")]
    if any(problem.kind == "catalog" for problem in problems):
        for extent in bad:  # first, so that the new catalog does not list them
            disk.delete(extent)
        recovery.rebuild(namespace.catalog, disk)
        return
    catalog = Catalog(namespace.catalog)
    rows = {row.id: row for row in catalog.load() if not isinstance(row, str)}
    try:
        catalog.remove(bad + [problem.name for problem in problems if problem.kind == "missing"])
        for problem in problems:
            if problem.kind in ("row", "differs"):
                record, old = recovery.salvage(disk, problem.name), rows.get(problem.name)
                if record is not None:
                    used = old or record
                    record = replace(record, last_used=used.last_used, hits=used.hits, expires=used.expires)
                    catalog.add(record, recovery.file_name(problem.name))
        for extent in bad + [problem.name for problem in problems if problem.kind == "orphan"]:
            disk.delete(extent)
    finally:
        catalog.close()
