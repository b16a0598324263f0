"""Names of the engine's numbers as metrics: vLLM's where the meaning is the same, `afterglow:` for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter"]


class Row(NamedTuple):
    """Publish a number of the engine's statistics under a name.

    `path`: where `EngineStats` has the number, for example `plan.counters.loads`; ` + ` adds up several numbers.
    """

    path: str
    name: str
    kind: Kind
    help: str
    labels: tuple[tuple[str, str], ...] = ()


def number_at(table: Mapping[str, float], path: str) -> float | None:
    """Read the number at a path of flattened statistics; None where a number is not known."""
    if path in table:
        return table[path]
    numbers = [table.get(each) for each in path.split(" + ")]
    return None if None in numbers else sum(number for number in numbers if number is not None)


def _rows(kind: Kind, within: str, fields: Sequence[tuple[str, str, str]]) -> list[Row]:
    """Make a row for each (field, name, help) of the statistics `within`."""
    return [Row(f"{within}.{field}", name, kind, text) for field, name, text in fields]


def _family(kind: Kind, path: str, name: str, text: str, label: str, values: Sequence[str]) -> list[Row]:
    """Make a row for each value of a label; the value stands in the path."""
    return [Row(path.format(value), name, kind, text, ((label, value),)) for value in values]


TIERS = ("device", "host", "disk")
SOURCES = (*TIERS, "shared")  # where cached tokens come from
MISSES = ("cold", "evicted", "expired", "damaged", "deleted", "salt")
GUESSES = ("predicted", "cancelled", "hit", "late", "wasted", "missing")

_PLAN = (
    ("running", "vllm:num_requests_running", "Requests in the running batch."),
    ("loading", "afterglow:requests_loading", "Waiting requests whose KV is on its way."),
    ("extents", "afterglow:extents", "Stored extents."),
    ("sessions", "afterglow:sessions", "Conversations with a name."),
    ("prefixes", "afterglow:registered_prefixes", "System prompts that are kept in all tiers."),
    ("prefix_rows", "afterglow:registered_prefix_tokens", "Tokens of registered system prompts."),
    ("marked_rows", "afterglow:marked_tokens", "Tokens before cache breakpoints that live."),
    ("contexts", "afterglow:contexts", "Contexts on the device, running or retained."),
    ("moves_in_flight", "afterglow:moves_in_flight", "Loads, stores and drops under way."),
    ("saves_in_flight", "afterglow:saves_in_flight", "Extents whose rows are being saved."),
    ("prefetch_window", "afterglow:prefetch_window", "Waiting requests that are fetched ahead for."),
    ("eviction_window", "afterglow:eviction_window", "Waiting requests whose KV is not evicted."),
    ("read_rate", "afterglow:read_bytes_per_second", "Disk rate that loads are predicted with."),
    ("fetch_rate", "afterglow:fetch_bytes_per_second", "Rate of the shared store that fetches are predicted with."),
    ("prefill_rate", "afterglow:prefill_tokens_per_second", "Rate that computing is predicted with."),
    ("read_buffer_layers", "afterglow:read_buffer_layers", "Layers loaded before the last request's turn, by formula."),
    ("read_buffer_bytes", "afterglow:read_buffer_bytes", "Bytes of these layers."),
    (
        "disk_over_bytes",
        "afterglow:disk_over_budget_bytes",
        "Bytes of files above a smaller disk budget, not yet removed.",
    ),
)
_PLAN_COUNTERS = (
    ("submitted", "afterglow:submitted", "Requests submitted."),
    ("stalled", "afterglow:stalled", "Requests sent back because their rows came late from disk and others waited."),
    ("finished", "afterglow:finished", "Requests that came to an end."),
    ("cancelled", "afterglow:cancelled", "Requests that were cancelled."),
    ("preemptions", "vllm:num_preemptions", "Running requests put back into the queue."),
    ("waits_prefix", "afterglow:prefix_waits", "Requests that waited for another's same tokens."),
    ("recomputed", "afterglow:recomputed_tokens", "Cached tokens computed again: that was predicted to be faster."),
    (
        "load_bytes_left",
        "afterglow:load_bytes_left",
        "Bytes of loaded extents that lie before a sliding window: not read.",
    ),
    ("truncations", "afterglow:truncated_prompts", "Prompts whose oldest tokens were left out."),
    (
        "truncations_unscored",
        "afterglow:truncated_prompts_unscored",
        "Prompts cut by importance without any known score.",
    ),
    ("loads", "afterglow:loads", "Extents read from disk."),
    ("stores", "afterglow:stores", "Extents written to disk."),
    ("dropped", "afterglow:dropped", "Extents forgotten in all tiers."),
    ("duplicates", "afterglow:duplicates", "Saved extents whose rows were there already."),
    ("orphans", "afterglow:orphans", "Saved extents whose prefix was gone."),
    ("damaged", "afterglow:damaged_extents", "Extents dropped for damage."),
    ("failed_loads", "afterglow:load_failures", "Failed reads of KV: rows were recomputed."),
    ("store_failures", "afterglow:store_failures", "Failed writes of KV: rows are forgotten."),
    ("drop_failures", "afterglow:drop_failures", "Files of KV that could not be removed; removal is tried again."),
    ("rows_unsaved", "afterglow:unsaved_rows", "New rows for which no host memory was free."),
    ("rows_marked", "afterglow:newly_marked_tokens", "Tokens that a request's cache breakpoints marked anew."),
    (
        "rows_over_share",
        "afterglow:marked_tokens_over_share",
        "Marked tokens kept no longer than others in a tier: the tenant's share of it was full.",
    ),
    ("prefetches", "afterglow:prefetches", "Extents fetched ahead."),
    ("probes", "afterglow:probe_loads", "Loads made to see whether a slow disk has become faster."),
    ("merges", "afterglow:merges", "Stored short turns that were joined with the turn before."),
    ("merged_rows", "afterglow:merged_tokens", "Tokens whose KV was copied to join short turns."),
    ("thrashed", "afterglow:thrashed_loads", "Loads of extents that had been evicted a moment before."),
    ("holds", "afterglow:prefill_holds", "Prefills that waited for host memory to be freed."),
    ("cut_loads", "afterglow:cut_loads", "Matches cut short for want of host memory."),
)
_ENGINE = (
    ("prompt_tokens", "vllm:prompt_tokens", "Prompt tokens, cached ones included."),
    ("prompt_tokens", "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache."),
    ("prefilled_tokens", "afterglow:prefilled_tokens", "Prompt tokens that were computed."),
    ("idle_tokens", "afterglow:idle_tokens", "Tokens that were computed ahead, while the engine was idle."),
    ("generation_tokens", "vllm:generation_tokens", "Generated tokens."),
    ("draft_tokens", "vllm:spec_decode_num_draft_tokens", "Guessed tokens that were verified."),
    ("accepted_tokens", "vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right."),
    ("steps", "afterglow:steps", "Steps of the engine."),
    ("plan_seconds", "afterglow:plan_seconds", "Time spent on planning and bookkeeping."),
    ("forward_seconds", "afterglow:forward_seconds", "Time spent on forward passes."),
    ("damaged_responses", "afterglow:damaged_responses", "Stored responses and replies dropped for damage."),
    ("kv_events.messages", "afterglow:kv_event_messages", "Messages of KV events that were published."),
    (
        "kv_events.dropped",
        "afterglow:kv_events_dropped",
        "Steps whose KV events were left out; all blocks follow then.",
    ),
    ("relay.groups", "afterglow:relay_groups", "Groups of requests that read rows together, over steps."),
)
_POOL = (
    ("pages", "afterglow:device_pages", "Pages of KV on the device that contexts hold, each once."),
    ("page_bytes", "afterglow:device_page_bytes", "Bytes of these pages."),
    ("slab_bytes", "afterglow:device_slab_bytes", "Bytes of the device's memory that pages are cut out of."),
)
_STORE = (
    ("queue", "afterglow:store_queue", "Calls that wait for a thread of the store."),
    ("hung", "afterglow:store_hung", "Calls that have not come back for too long."),
    ("write_buffer_bytes", "afterglow:write_buffer_bytes", "Bytes of new KV that may wait to be saved."),
    ("catalog_bytes", "afterglow:catalog_bytes", "Bytes of the catalog."),
    ("direct_io", "afterglow:direct_io", "1 where reads bypass the page cache."),
)
_STORE_COUNTERS = (
    ("disk_reads", "afterglow:disk_reads", "Reads of extents."),
    ("disk_read_bytes", "vllm:kv_offload_load_bytes", "Bytes of KV read from disk."),
    ("disk_read_seconds", "vllm:kv_offload_load_time", "Seconds spent on reading KV."),
    ("disk_writes", "afterglow:disk_writes", "Writes of extents."),
    ("disk_write_bytes", "vllm:kv_offload_store_bytes", "Bytes of KV written to disk."),
    ("disk_write_seconds", "vllm:kv_offload_store_time", "Seconds spent on writing KV."),
    ("disk_drops", "afterglow:disk_drops", "Removals of extents."),
    ("chunk_reads", "afterglow:chunk_reads", "Reads of some chunks of one extent."),
    ("chunk_read_bytes", "afterglow:chunk_read_bytes", "Bytes of chunks read."),
    ("chunk_read_seconds", "afterglow:chunk_read_seconds", "Seconds spent on reading chunks."),
    ("host_save_bytes", "afterglow:host_save_bytes", "Bytes of new KV brought to host memory."),
    ("host_save_seconds", "afterglow:host_save_seconds", "Seconds spent on bringing new KV to host memory."),
    ("host_copies", "afterglow:host_copies", "Copies within host memory."),
    ("host_copy_bytes", "afterglow:host_copy_bytes", "Bytes copied within host memory."),
    ("host_copy_seconds", "afterglow:host_copy_seconds", "Seconds spent on copies within host memory."),
    ("save_waits", "afterglow:save_waits", "Saves that waited for room in the write buffer."),
    ("save_wait_seconds", "afterglow:save_wait_seconds", "Seconds that saves waited for the write buffer."),
    ("notes_damaged", "afterglow:damaged_notes", "Notes about conversations lost to damage."),
    ("orphans_swept", "afterglow:orphans_swept", "Files without a row, removed after the start."),
    ("catalog_rebuilds", "afterglow:catalog_rebuilds", "Catalogs made anew from the extents."),
)
_SHARED = (
    ("queue", "afterglow:shared_queue", "Extents that wait to be published to the shared store, or fetched."),
    ("hung", "afterglow:shared_hung", "Calls of the shared store that have not come back for too long."),
    ("rests", "afterglow:shared_rests", "1 while the shared store is left alone, because it has failed."),
    ("used_bytes", "afterglow:shared_used_bytes", "Bytes of the model's KV in the shared store, as last counted."),
)
_SHARED_COUNTERS = (
    ("lookups", "afterglow:shared_lookups", "Prompts looked up in the shared store."),
    ("lookup_seconds", "afterglow:shared_lookup_seconds", "Seconds that requests waited for it."),
    (
        "lookups_skipped",
        "afterglow:shared_lookups_skipped",
        "Prompts not looked up: too many at a time, or it has failed.",
    ),
    ("found_extents", "afterglow:shared_found", "Extents that were found."),
    ("fetches", "afterglow:shared_fetches", "Extents fetched."),
    ("fetch_bytes", "afterglow:shared_fetch_bytes", "Bytes fetched."),
    ("fetch_seconds", "afterglow:shared_fetch_seconds", "Seconds spent on fetching."),
    ("published", "afterglow:shared_published", "Extents published."),
    ("published_bytes", "afterglow:shared_published_bytes", "Bytes published."),
    ("published_before", "afterglow:shared_published_before", "Extents that were there already."),
    (
        "unpublished",
        "afterglow:shared_unpublished",
        "Extents not published: a full queue or store, faults, files gone.",
    ),
    (
        "bad_records",
        "afterglow:shared_bad_records",
        "Records of conversations and names that were damaged or another's.",
    ),
    ("directory_lookups", "afterglow:shared_directory_lookups", "Prompts that the directory looked up."),
    ("directory_failures", "afterglow:shared_directory_failures", "Failed calls of the directory."),
    ("swept", "afterglow:shared_swept", "Extents removed for the budget, or because they had expired."),
    (
        "deleted",
        "afterglow:shared_deleted",
        "Extents removed because a client deleted them, or merged ones replaced them.",
    ),
)
_IMPORTANCE = (
    ("requests", "afterglow:importance_requests", "Requests that attended to a part of their cached prefix."),
    ("layers", "afterglow:importance_layers", "Layers in which rows were selected."),
    ("fallbacks", "afterglow:importance_fallback_layers", "Layers that read all keys, because probe heads disagreed."),
    ("renewals", "afterglow:importance_renewals", "Layers that selected anew while decoding."),
    ("renewed_rows", "afterglow:importance_renewed_rows", "Rows whose keys or values were loaded while decoding."),
    ("failed_renewals", "afterglow:importance_failed_renewals", "Layers that kept their selection, as a load failed."),
    ("waited", "afterglow:importance_wait_seconds", "Time in which layers waited for chunks."),
    ("mapping", "afterglow:importance_mapping_seconds", "Time of mapping rows to chunks."),
    ("identifying", "afterglow:importance_identification_seconds", "Time spent on selecting important rows."),
    ("reordered", "afterglow:importance_reordered_extents", "Extents whose rows were put in another order."),
)
_SELECTED: tuple[str, Kind, str] = (
    "afterglow:importance_rows",
    "counter",
    "Rows of prefixes in all layers, by whether they were kept.",
)
_GATHERED = "Bytes of cached KV for steps, by whether they were read or lie before a sliding window."
_AHEAD = "Bytes of cached KV read from host memory before a request's turn, and those of them that it then used."
_RELAYED = "Rows of KV in one layer, by whether a group read them or need not read them again."

ROWS = (
    *_rows("gauge", "plan", _PLAN),
    Row("plan.waiting + plan.loading", "vllm:num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    *_rows("counter", "plan.counters", _PLAN_COUNTERS),
    *_family("counter", "plan.counters.missed_{}", "afterglow:missed_tokens", "Computed prompt tokens.", "why", MISSES),
    *_family("counter", "plan.counters.prefetches_{}", "afterglow:prefetches_ended", "Extents fetched ahead, by their end.",
             "how", ("useful", "late", "wasted")),
    *_family("counter", "plan.counters.evicted_{}", "afterglow:evictions", "Evictions.", "tier", TIERS),
    *_rows("counter", "engine", _ENGINE),
    Row(" + ".join(f"engine.cached_tokens.{source}" for source in SOURCES), "vllm:prefix_cache_hits", "counter",
        "Prompt tokens found in the cache."),
    *_family("counter", "engine.cached_tokens.{}", "vllm:prompt_tokens_cached_by_source",
             "Prompt tokens that were not computed, by the tier they were in.", "source", SOURCES),
    *_family("counter", "engine.finished.{}", "vllm:request_success", "Finished requests.", "finished_reason",
             ("stop", "length")),
    *_family("counter", "engine.finished.{}", "afterglow:requests_unfinished", "Requests that ended early.", "reason",
             ("cancelled", "error")),
    Row("engine.relay.levels", "afterglow:relay_levels", "gauge", "Most levels of groups within groups so far."),
    *_family("counter", "engine.relay.rows_{}", "afterglow:relay_rows", _RELAYED, "what", ("read", "saved")),
    *_family("counter", "engine.gather.bytes_{}", "afterglow:gather_bytes", _GATHERED, "what", ("read", "left")),
    *_family("counter", "engine.gather.ahead_{}", "afterglow:read_ahead_bytes", _AHEAD, "what", ("read", "used")),
    *_family("gauge", "tiers.{}.used", "afterglow:tier_used_bytes", "Bytes of KV a tier holds.", "tier", TIERS),
    *_family("gauge", "tiers.{}.capacity", "afterglow:tier_capacity_bytes", "Bytes of KV a tier may hold.", "tier", TIERS),
    *_rows("gauge", "pool", _POOL),
    *_rows("gauge", "store", _STORE),
    *_rows("counter", "store", _STORE_COUNTERS),
    *_rows("gauge", "shared", _SHARED),
    *_rows("counter", "shared", _SHARED_COUNTERS),
    *_rows("counter", "importance", _IMPORTANCE),
    Row("importance.rows_of", *_SELECTED, labels=(("which", "all"),)),
    Row("importance.rows_kept", *_SELECTED, labels=(("which", "kept"),)),
    *_family("counter", "importance.tally.{}", "afterglow:speculative_bytes",
             "Bytes of chunks that were guessed for the next layer, or should have been.", "outcome", GUESSES),
)  # fmt: skip
