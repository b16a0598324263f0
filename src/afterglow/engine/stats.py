"""Statistics of an engine, for metrics and benchmarks. Reading them never waits for the engine.

`EngineStats` nests the structures in which the engine, the plan, the store and the importance loader count; a metric
names its number by the path, for example `plan.counters.loads`.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from afterglow.importance.chunk_loader import ImportanceStats
from afterglow.plan.options import Capacity
from afterglow.plan.stats import Stats
from afterglow.request import CachedTokens
from afterglow.store.moving.store_stats import StoreStats

if TYPE_CHECKING:  # not at the start of an engine that shares nothing
    from afterglow.store.shared.counters import SharedStats


@dataclass(slots=True)
class RelayCounters:
    """Count rows that several requests of a step read together. Rows are those of one layer."""

    groups: int = 0  # of requests that read rows together, summed over steps
    levels: int = 0  # deepest nesting of groups so far
    rows_read: int = 0  # once for each group
    rows_saved: int = 0  # rows that were not read again for each request

    def group(self, rows: int, jobs: int) -> None:
        """Count a group of a step that has read `rows` rows for `jobs` jobs."""
        self.groups += 1
        self.rows_read += rows
        self.rows_saved += rows * (jobs - 1)


@dataclass(slots=True)
class GatherCounters:
    """Count bytes of cached rows that steps needed on the device, as they are stored."""

    bytes_read: int = 0
    bytes_left: int = 0  # in layers with a sliding window, of rows before it
    ahead_read: int = 0  # copied to the device before the turn of the request that was going to need them
    ahead_used: int = 0  # of these, those that it needed

    def count(self, read: int, left: int) -> None:
        """Count a layer of a context."""
        self.bytes_read += read
        self.bytes_left += left


@dataclass(slots=True)
class KVEventCounters:
    """Count published KV events."""

    messages: int = 0
    dropped: int = 0  # steps whose changes were left out, because too many waited or they could not be sent


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start that the engine counts itself. Only the engine's thread writes them."""

    prompt_tokens: int = 0  # cached tokens included
    generation_tokens: int = 0
    prefilled_tokens: int = 0
    idle_tokens: int = (
        0  # computed for turns that are expected, and for prompts that attended to a part of their prefix
    )
    cached_tokens: dict[str, int] = field(
        default_factory=lambda: {"device": 0, "host": 0, "disk": 0, "shared": 0}
    )  # of prompts
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "cancelled": 0, "error": 0})
    steps: int = 0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    draft_tokens: int = 0  # guessed ones that were verified
    accepted_tokens: int = 0  # those of them that were drawn
    damaged_responses: int = 0
    relay: RelayCounters = field(default_factory=RelayCounters)
    gather: GatherCounters = field(default_factory=GatherCounters)
    kv_events: KVEventCounters = field(default_factory=KVEventCounters)

    def admitted(self, prompt: int, cached: CachedTokens) -> None:
        """Count an admitted request with `prompt` prompt tokens."""
        self.prompt_tokens += prompt
        self.cached_tokens["device"] += cached.device
        self.cached_tokens["host"] += cached.host
        self.cached_tokens["disk"] += cached.disk
        self.cached_tokens["shared"] += cached.shared

    def step(self, plan_seconds: float, forward_seconds: float, prefilled: int) -> None:
        """Count a step in which `prefilled` prompt tokens were computed."""
        self.steps += 1
        self.plan_seconds += plan_seconds
        self.forward_seconds += forward_seconds
        self.prefilled_tokens += prefilled

    def drafts(self, verified: int, accepted: int) -> None:
        """Count a step's guesses."""
        self.draft_tokens += verified
        self.accepted_tokens += accepted

    def copy(self) -> EngineCounters:
        """Return a copy that no later step changes."""
        return replace(
            self,
            cached_tokens=dict(self.cached_tokens),
            finished=dict(self.finished),
            relay=replace(self.relay),
            gather=replace(self.gather),
            kv_events=replace(self.kv_events),
        )


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of KV in one tier: how many it holds, and how many it may hold."""

    used: int = 0
    capacity: int = 0


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes of KV by tier. `kv_dtype`: the dtype of stored rows, in host and on disk; "int8" has a scale for each row and head."""

    device: TierBytes = TierBytes()
    host: TierBytes = TierBytes()
    disk: TierBytes = TierBytes()
    kv_dtype: str = ""

    @classmethod
    def of(
        cls, plan: Stats, capacity: Capacity, device_row_bytes: int, host_block_bytes: int, kv_dtype: str = ""
    ) -> Tiers:
        """Turn the plan's rows and slots into bytes."""
        return cls(
            TierBytes(plan.device_rows * device_row_bytes, capacity.device_rows * device_row_bytes),
            TierBytes(plan.host_slots * host_block_bytes, capacity.host_slots * host_block_bytes),
            TierBytes(plan.disk_bytes, capacity.disk_bytes),
            kv_dtype,
        )


@dataclass(frozen=True, slots=True)
class PoolLevels:
    """Count the pages of KV that contexts on the device hold, each once, and their bytes; and the bytes of the slabs that all pages are
    cut out of. `Tiers.device` is what the plan counts, this is what was lent and allocated."""

    pages: int = 0
    page_bytes: int = 0
    slab_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Levels now and totals since the start, as of the last step. `pool`, `store` and `shared` are of this moment. `importance`,
    `shared`: None unless `--importance`, `--shared` is on."""

    engine: EngineCounters = field(default_factory=EngineCounters)
    tiers: Tiers = Tiers()
    pool: PoolLevels = PoolLevels()
    plan: Stats = field(default_factory=Stats)
    store: StoreStats = field(default_factory=StoreStats)
    importance: ImportanceStats | None = None
    shared: SharedStats | None = None

    @classmethod
    def counted(cls, engine: EngineCounters, plan: Stats, importance: ImportanceStats | None) -> EngineStats:
        """Copy the numbers of the engine's thread, so that other threads may read them. `plan` is a copy already."""
        return cls(engine=engine.copy(), plan=plan, importance=deepcopy(importance))
