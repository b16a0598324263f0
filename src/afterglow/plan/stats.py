"""The plan's counters and levels: plain numbers. The metrics name them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    failed_loads: int = 0  # jobs that were sent back because an extent did not arrive
    stalled: int = (
        0  # jobs that were sent back because an extent was late and others waited: they join when it is there
    )
    query_tokens: int = 0  # prompt tokens of admitted jobs, and where they were found
    hit_device: int = 0
    hit_host: int = 0
    hit_disk: int = 0
    hit_shared: int = 0
    loads: int = 0
    load_bytes_left: int = 0  # of loaded extents, before all windows of layers that have one: not read
    prefetches: int = 0
    prefetches_useful: int = 0  # in host when the job's turn came
    prefetches_late: int = 0  # still on their way
    prefetches_wasted: int = 0  # evicted before they were of use
    probes: int = 0  # loads to see how fast the disk is
    thrashed: int = 0  # loads of extents that had been evicted a moment before
    stores: int = 0
    evicted_host: int = 0  # extents that left the host tier
    evicted_disk: int = 0  # extents that left the disk tier to make room
    evicted_device: int = 0  # retained contexts freed
    dropped: int = 0  # extents forgotten in all tiers
    damaged: int = 0
    store_failures: int = 0
    drop_failures: int = 0  # files that could not be removed
    rows_unsaved: int = 0
    merges: int = 0  # extents of short turns that were put together, and the rows copied for that
    merged_rows: int = 0
    duplicates: int = 0  # sealed drafts whose rows were there already
    orphans: int = 0  # sealed drafts whose prefix was gone
    recomputed: int = 0  # cached rows that were computed again: that was predicted to be faster, or they found no slots
    truncations: int = 0  # prompts that were cut
    truncations_unscored: int = 0  # by `sinks_and_recent`, for want of the scores that `importance` goes by
    holds: int = 0  # prefills that waited for host slots to be freed, so that their rows could be saved
    cut_loads: int = 0  # matches cut short because no host slots could be had for them
    waits_prefix: int = 0  # jobs that waited for the same tokens being computed by another

    rows_marked: int = 0  # rows that were not marked before a breakpoint was set behind them
    rows_over_share: int = 0  # marked rows that counted as unmarked in a tier, for want of room in their tenant's share

    missed_cold: int = 0  # prompt tokens that were computed: never seen before
    missed_evicted: int = 0  # they, or what they hang below, had left all tiers to make room
    missed_expired: int = 0
    missed_damaged: int = 0
    missed_deleted: int = 0
    missed_salt: int = 0  # another tenant has them

    def count_miss(self, why: str, tokens: int) -> None:
        """Count tokens that a job computed because they were not cached."""
        setattr(self, f"missed_{why}", getattr(self, f"missed_{why}") + tokens)

    @property
    def evicted(self) -> int:
        """Whatever has left any tier."""
        return self.evicted_host + self.evicted_disk + self.evicted_device + self.dropped

    def count_hits(self, prompt: int, device: int, host: int, disk: int, shared: int = 0) -> None:
        """Count the cached tokens of an admitted job."""
        self.query_tokens += prompt
        self.hit_device += device
        self.hit_host += host
        self.hit_disk += disk
        self.hit_shared += shared


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot."""

    prefetch_window: int = 0  # waiting jobs whose rows are fetched ahead
    eviction_window: int = 0  # waiting jobs whose rows stay in some tier
    read_rate: float | None = None  # bytes/s from disk, as measured; None: not yet
    fetch_rate: float | None = None  # bytes/s from the shared tier
    prefill_rate: float | None = None  # rows/s of a prefill of 512 rows, as measured
    read_buffer_layers: int = 0  # of the last job whose rows were loaded, where the size is a formula's
    read_buffer_bytes: int = 0
    sessions: int = 0  # conversations with a name
    prefixes: int = 0  # registered, and their tokens
    prefix_rows: int = 0
    marked_rows: int = 0  # before breakpoints that live
    waiting: int = 0
    loading: int = 0
    running: int = 0
    extents: int = 0
    contexts: int = 0
    device_rows: int = 0  # used, of running jobs and retained contexts
    device_rows_total: int = 0
    host_slots: int = 0  # used
    host_slots_total: int = 0
    disk_bytes: int = 0  # used
    disk_bytes_total: int = 0
    disk_over_bytes: int = 0  # above it: after a restart with less, until files have been removed
    moves_in_flight: int = 0
    saves_in_flight: int = 0  # drafts not yet resolved
    counters: Counters = field(default_factory=Counters)  # a copy
