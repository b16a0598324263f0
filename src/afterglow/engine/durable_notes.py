"""Write down what has to be known after a restart: uses of extents, notes about conversations and prefixes, and how important
rows were."""

from __future__ import annotations

import logging

from afterglow.engine.setup import EngineParts
from afterglow.errors import StoreError
from afterglow.store.database.notes import IMPORTANCE
from afterglow.store.faults import kind_of

log = logging.getLogger("afterglow.engine")

INTERVAL = 5.0  # seconds between two writes while the engine works
WRITE_SECONDS = 0.8  # how long a caller waits for a write: a disk that refuses says so by then


class DurableNotes:
    """Pass notes to the catalog. Only the engine's thread calls `remember`, `now_and_then` and `give_up`."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._written_at = 0.0
        self._store_failures = 0  # failed writes of extents that the log has told of

    def now_and_then(self, now: float) -> None:
        """Hand the notes over if it is time."""
        if now - self._written_at >= INTERVAL:
            self._written_at = now
            self.remember()

    def remember(self, last: bool = False) -> None:
        """Hand over which extents were used, and the notes that have changed. `last`: the engine is closing."""
        failures = self._parts.scheduler.stats().counters.store_failures
        failed, self._store_failures = failures - self._store_failures, failures
        if failed:
            log.warning("%d extents could not be written to disk: is it full, or read-only?", failed)
        self._parts.store.touch(self._parts.scheduler.cache.disk.take_touched())
        notes: dict[str, list[tuple[str, str | None]]] = {}
        for kind, key, value in self._parts.scheduler.cache.take_notes(last):
            notes.setdefault(kind, []).append((key, value))
        for kind, items in notes.items():
            self._parts.store.note(kind, items)
        if self._parts.selective is not None:
            self._parts.store.note(IMPORTANCE, self._parts.selective.loader.take_notes(last))

    def give_up(self) -> None:
        """Give up extents that are not on disk, and log how many, and why. Without a disk tier nothing is ever kept."""
        plan, budget = self._parts.scheduler, self._parts.capacity.disk_bytes
        lost = plan.give_up() if budget else None
        if lost is not None and lost.extents:
            left = max(0, budget - plan.stats().disk_bytes)
            why = (
                f"are not on disk, whose budget of {budget / 1e6:.1f} MB has {left / 1e6:.1f} MB left (--disk-cache)"
                if left < lost.bytes
                else "could not be written to disk: is it full or read-only, or the folder gone?"
            )
            log.warning(
                "%d tokens (%d extents, %.1f MB) end with this process: they %s",
                lost.rows,
                lost.extents,
                lost.bytes / 1e6,
                why,
            )

    def write(self) -> bool:
        """Wait until the notes that were handed over are on disk; from any thread.

        Returns False if the disk refuses, and True if it does not answer in time: it may yet write them.
        """
        try:
            self._parts.store.write_notes(WRITE_SECONDS)
        except StoreError as error:
            log.warning("it is not known yet whether a registered prefix will be known after a restart: %s", error)
            return kind_of(error) == "timeout"
        return True
