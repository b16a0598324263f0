"""Numbers about the engine, for metrics and benchmarks. Reading them never waits for the engine."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from afterglow.importance.loader import LoaderStats
from afterglow.plan.extent import Capacity
from afterglow.plan.stats import Stats
from afterglow.request import CachedTokens
from afterglow.store.kvstore import StoreStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Levels now, and totals since the start. Tokens are prompt tokens unless said otherwise."""

    running: int = 0
    waiting: int = 0
    device_used_bytes: int = 0
    device_capacity_bytes: int = 0
    host_used_bytes: int = 0
    host_capacity_bytes: int = 0
    disk_used_bytes: int = 0
    disk_capacity_bytes: int = 0
    extents: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_host: int = 0
    cached_tokens_disk: int = 0
    prefilled_tokens: int = 0
    requests_stop: int = 0
    requests_length: int = 0
    requests_cancelled: int = 0
    requests_error: int = 0
    steps: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    load_bytes: int = 0
    load_seconds: float = 0.0
    store_bytes: int = 0
    store_seconds: float = 0.0
    host_evictions: int = 0
    disk_evictions: int = 0
    device_evictions: int = 0
    damaged_extents: int = 0
    load_failures: int = 0
    store_failures: int = 0
    unsaved_rows: int = 0
    damaged_responses: int = 0
    preemptions: int = 0
    relay_groups: int = 0  # of requests that read rows together, summed over steps
    relay_levels: int = 0  # of the deepest nesting of them so far
    relay_rows_read: int = 0  # once for a group, in each layer
    relay_rows_saved: int = 0  # that were not read again for each request
    importance: LoaderStats | None = None  # of requests that attend to a part of their prefix
    plan: Stats | None = None  # all that the plan counts
    store: StoreStats | None = None  # all that the store counts


@dataclass(slots=True)
class Totals:
    """What the engine itself counts; written by its thread alone."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefilled_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    finishes: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0

    def admitted(self, prompt: int, cached: CachedTokens) -> None:
        self.prompt_tokens += prompt
        self.cached["device"] += cached.device
        self.cached["host"] += cached.host
        self.cached["disk"] += cached.disk

    def finished(self, reason: str) -> None:
        self.finishes[reason] = self.finishes.get(reason, 0) + 1

    def step(self, plan_seconds: float, forward_seconds: float, prefilled: int) -> None:
        self.steps += 1
        self.plan_seconds += plan_seconds
        self.forward_seconds += forward_seconds
        self.prefilled_tokens += prefilled


@dataclass(slots=True)
class RelayCounts:
    """What was read together, in rows of one layer; written by the engine's thread alone."""

    groups: int = 0
    levels: int = 0
    rows_read: int = 0
    rows_saved: int = 0

    def group(self, rows: int, jobs: int) -> None:
        """A group of a step has read rows for so many jobs."""
        self.groups += 1
        self.rows_read += rows
        self.rows_saved += rows * (jobs - 1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the engine's thread and the plan count, at one moment: copies, which nobody changes any more."""

    totals: Totals
    plan: Stats
    relayed: RelayCounts
    importance: LoaderStats | None

    @classmethod
    def of(cls, totals: Totals, plan: Stats, relayed: RelayCounts, importance: LoaderStats | None) -> Snapshot:
        """Copies of what changes; `plan` is a copy already."""
        copied = replace(totals, cached=dict(totals.cached), finishes=dict(totals.finishes))
        return cls(copied, plan, replace(relayed), deepcopy(importance))


def collect(
    now: Snapshot, store: StoreStats, capacity: Capacity, device_row_bytes: int, host_block_bytes: int
) -> EngineStats:
    """What the engine, the plan and the store each count, in one."""
    totals, plan, relayed = now.totals, now.plan, now.relayed
    counters = plan.counters
    finishes = totals.finishes
    return EngineStats(
        running=plan.running,
        waiting=plan.waiting + plan.loading,
        device_used_bytes=plan.device_rows * device_row_bytes,
        device_capacity_bytes=capacity.device_rows * device_row_bytes,
        host_used_bytes=plan.host_slots * host_block_bytes,
        host_capacity_bytes=capacity.host_slots * host_block_bytes,
        disk_used_bytes=plan.disk_bytes,
        disk_capacity_bytes=capacity.disk_bytes,
        extents=plan.extents,
        prompt_tokens=totals.prompt_tokens,
        generation_tokens=totals.generation_tokens,
        cached_tokens_device=totals.cached["device"],
        cached_tokens_host=totals.cached["host"],
        cached_tokens_disk=totals.cached["disk"],
        prefilled_tokens=totals.prefilled_tokens,
        requests_stop=finishes.get("stop", 0),
        requests_length=finishes.get("length", 0),
        requests_cancelled=finishes.get("cancelled", 0),
        requests_error=finishes.get("error", 0),
        steps=totals.steps,
        relay_groups=relayed.groups,
        relay_levels=relayed.levels,
        relay_rows_read=relayed.rows_read,
        relay_rows_saved=relayed.rows_saved,
        plan_seconds=totals.plan_seconds,
        forward_seconds=totals.forward_seconds,
        load_bytes=store.disk_read_bytes,
        load_seconds=store.disk_read_seconds,
        store_bytes=store.disk_write_bytes,
        store_seconds=store.disk_write_seconds,
        host_evictions=counters.evicted_host,
        disk_evictions=counters.evicted_disk,
        device_evictions=counters.evicted_device,
        damaged_extents=counters.damaged,
        load_failures=counters.failed_loads,
        store_failures=counters.store_failures,
        unsaved_rows=counters.rows_unsaved,
        preemptions=counters.preemptions,
        importance=now.importance,
        plan=plan,
        store=store,
    )
