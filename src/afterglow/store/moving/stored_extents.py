"""The extents on disk: files in a tier, rows in the catalog, and the order in which both are written."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from afterglow.errors import DamageError, StoreError
from afterglow.plan.step import ExtentRecord
from afterglow.store.database.catalog import Catalog
from afterglow.store.database.recovery import file_name
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.tier import Tier
from afterglow.store.faults import kind_of

log = logging.getLogger("afterglow.store")


class StoredExtents:
    """A tier and its catalog, which agree; without a disk there are no extents. May be used from several threads, but only by one
    at a time for the same extent.
    """

    def __init__(
        self, layout: KVLayout, tier: Tier | None, catalog: Catalog | None, records: Sequence[ExtentRecord] = ()
    ) -> None:
        """`records`: the extents that are there."""
        self.layout = layout
        self.tier = tier
        self.catalog = catalog
        self.bytes = sum(record.file_bytes for record in records)
        self._rows = {record.id: record.rows for record in records}
        self._lock = threading.Lock()

    def __contains__(self, extent: str) -> bool:
        return extent in self._rows

    def rows(self, extent: str) -> int:
        """Return the number of rows of an extent.

        Raises:
            StoreError: it is not on disk.
        """
        rows = self._rows.get(extent)
        if rows is None:
            raise StoreError(f"extent {extent[:16]} is not on disk") from FileNotFoundError(2, "missing")
        return rows

    def known_rows(self, extent: str) -> int | None:
        """Return the number of rows of an extent, or None if it is not on disk."""
        return self._rows.get(extent)

    def sized(self, record: ExtentRecord) -> ExtentRecord:
        """Complete a record by the size of the extent's file."""
        return replace(record, file_bytes=self.layout.file_bytes(record.rows))

    def add(self, record: ExtentRecord, advance: Callable[[], None]) -> None:
        """Enter an extent whose file is there; without its row the file goes again. `advance` is called when the row is there.

        Raises:
            StoreError: the row cannot be written, or `advance` says so.
        """
        assert self.catalog is not None, "there is no disk tier"
        try:
            self.catalog.add(record, file_name(record.id))
            advance()
        except StoreError:
            self.discard(record.id)
            raise
        with self._lock:
            if record.id not in self._rows:
                self.bytes += record.file_bytes
            self._rows[record.id] = record.rows

    def remove(self, extent: str) -> None:
        """Remove an extent: row first, then file, so that a crash in between leaves an orphan and not a promise.

        Where the catalog fails the file goes all the same, for its room; the row goes at the next start.

        Raises:
            StoreError: the row or the file cannot be removed.
        """
        with self._lock:
            rows = self._rows.pop(extent, None)
            if rows is not None:
                self.bytes -= self.layout.file_bytes(rows)
        if self.tier is not None and self.catalog is not None:
            try:
                self.catalog.remove([extent])
            finally:
                self.tier.delete(extent)

    def discard(self, extent: str) -> None:
        """Remove an extent as far as that is possible."""
        with contextlib.suppress(StoreError):
            self.remove(extent)

    def drop_lost(self, extent: str, error: StoreError) -> None:
        """Remove an extent that can never be read again: its room is worth more than the evidence.

        An I/O error may pass: whether it has, the plan finds out later.
        """
        if isinstance(error, DamageError) or kind_of(error) == "missing":
            log.warning("dropped from the cache: %s", error)
            self.discard(extent)
