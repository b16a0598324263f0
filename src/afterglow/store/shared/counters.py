"""Counters of the shared tier, kept from several threads."""

from __future__ import annotations

from dataclasses import dataclass, field

from afterglow.errors import StoreError
from afterglow.store.faults import kind_of
from afterglow.store.moving.store_stats import LockedCounters


@dataclass(slots=True)
class SharedStats:
    """Counters since the start, and levels: those from `queue` on. Seconds are time inside calls.

    `failures` counts calls that failed, by kind: missing, damage, timeout, no_space, denied (credentials), io, refused (the store is left
    alone).
    """

    lookups: int = 0
    lookup_seconds: float = 0.0
    found_extents: int = 0
    lookups_skipped: int = 0  # too many were under way
    fetches: int = 0
    fetch_bytes: int = 0
    fetch_seconds: float = 0.0
    published: int = 0
    published_bytes: int = 0
    published_before: int = 0  # extents that another engine had published
    unpublished: int = 0  # extents that could not be published: queue or store full, faults, file gone
    swept: int = 0  # extents removed to make room, or because they had expired
    deleted: int = 0  # extents removed because a client asked for it, or because merged ones have replaced them
    bad_records: int = 0  # of conversations and names, damaged or another's: they count as missing
    directory_lookups: int = 0  # prompts that the directory looked up
    directory_failures: int = 0  # calls of the directory that failed; it is left alone then
    failures: dict[str, int] = field(default_factory=dict)
    queue: int = 0  # extents that wait to be published or fetched
    hung: int = 0
    rests: bool = False  # is the store left alone, because it has failed?
    used_bytes: int = 0  # as last counted


class SharedCounters(LockedCounters[SharedStats]):
    """The counters of a shared tier."""

    def __init__(self) -> None:
        stats = SharedStats()
        super().__init__(stats, stats.failures)

    def failed(self, error: StoreError) -> str:
        """Count an error; returns its kind."""
        kind = "denied" if isinstance(error.__cause__, PermissionError) else kind_of(error)
        self.count_error(kind)
        return kind
