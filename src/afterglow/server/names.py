"""How the engine's numbers are called: vLLM's names where the meaning is the same, `afterglow:` for the rest."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Row(NamedTuple):
    """How a field of the engine's statistics is published."""

    field: str
    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[tuple[str, str], ...] = ()


def _by(label: str, value: str) -> tuple[tuple[str, str], ...]:
    return ((label, value),)


PLAN_ROWS = (
    Row("plan_sessions", "afterglow:sessions", "gauge", "Conversations with a name."),
    Row("plan_prefixes", "afterglow:registered_prefixes", "gauge", "System prompts that are kept in all tiers."),
    Row("plan_prefix_rows", "afterglow:registered_prefix_tokens", "gauge", "Tokens of them."),
    Row("plan_loading", "afterglow:requests_loading", "gauge", "Waiting requests whose KV is on its way."),
    Row("plan_contexts", "afterglow:contexts", "gauge", "Contexts on the device, running or retained."),
    Row("plan_moves_in_flight", "afterglow:moves_in_flight", "gauge", "Loads, stores and drops under way."),
    Row("plan_saves_in_flight", "afterglow:saves_in_flight", "gauge", "Extents whose rows are being saved."),
    Row("plan_prefetch_window", "afterglow:prefetch_window", "gauge", "Waiting requests that are fetched ahead for."),
    Row("plan_eviction_window", "afterglow:eviction_window", "gauge", "Waiting requests whose KV is not evicted."),
    Row("plan_read_rate", "afterglow:read_bytes_per_second", "gauge", "Disk rate that loads are predicted with."),
    Row("plan_prefill_rate", "afterglow:prefill_tokens_per_second", "gauge", "Rate that computing is predicted with."),
    Row("plan_truncations", "afterglow:truncated_prompts", "counter", "Prompts of which the oldest was left out."),
    Row(
        "plan_truncations_unscored",
        "afterglow:truncated_prompts_unscored",
        "counter",
        "Prompts that were to be cut by importance, and of which no token's importance was known.",
    ),
    Row(
        "plan_recomputed",
        "afterglow:recomputed_tokens",
        "counter",
        "Cached tokens that were computed again, because that was predicted to be faster.",
    ),
    Row("plan_prefetches", "afterglow:prefetches", "counter", "Extents fetched ahead."),
    *(
        Row(f"plan_prefetches_{how}", "afterglow:prefetches_ended", "counter", "What became of them.", _by("how", how))
        for how in ("useful", "late", "wasted")
    ),
    *(
        Row(
            f"plan_missed_{why}",
            "afterglow:missed_tokens",
            "counter",
            "Prompt tokens that were computed, by why.",
            _by("why", why),
        )
        for why in ("cold", "evicted", "expired", "damaged", "deleted", "salt")
    ),
    Row(
        "plan_disk_over_bytes",
        "afterglow:disk_over_budget_bytes",
        "gauge",
        "Bytes of files above the disk's budget: after a restart with less, until they have been removed.",
    ),
    Row(
        "plan_drop_failures",
        "afterglow:drop_failures",
        "counter",
        "Files of KV that could not be removed: others go in their place, and they are tried again.",
    ),
    Row("plan_probes", "afterglow:probe_loads", "counter", "Loads made to see whether a slow disk has become faster."),
    Row("plan_merges", "afterglow:merges", "counter", "Stored short turns that were joined with the turn before."),
    Row("plan_merged_rows", "afterglow:merged_tokens", "counter", "Tokens whose KV was copied for that."),
    Row("plan_thrashed", "afterglow:thrashed_loads", "counter", "Loads of what had been evicted a moment before."),
    Row("plan_holds", "afterglow:prefill_holds", "counter", "Prefills that waited for host memory to be freed."),
    Row("plan_cut_loads", "afterglow:cut_loads", "counter", "Matches cut short for want of host memory."),
    Row("plan_waits_prefix", "afterglow:prefix_waits", "counter", "Requests that waited for another's same tokens."),
    *(
        Row(f"plan_{name}", f"afterglow:{name}", "counter", text)
        for name, text in (
            ("submitted", "Requests submitted."),
            ("stalled", "Requests sent back because their rows came late from disk and others waited."),
            ("finished", "Requests that came to an end."),
            ("cancelled", "Requests that were cancelled."),
            ("loads", "Extents read from disk."),
            ("stores", "Extents written to disk."),
            ("dropped", "Extents forgotten in all tiers."),
            ("duplicates", "Saved extents whose rows were there already."),
            ("orphans", "Saved extents whose prefix was gone."),
        )
    ),
)

STORE_ROWS = (
    Row("store_queue", "afterglow:store_queue", "gauge", "Calls that wait for a thread of the store."),
    Row("store_hung", "afterglow:store_hung", "gauge", "Calls that have not come back for too long."),
    Row("store_catalog_bytes", "afterglow:catalog_bytes", "gauge", "Bytes of the catalog."),
    Row("store_chunk_reads", "afterglow:chunk_reads", "counter", "Reads of some chunks of one extent."),
    Row("store_chunk_read_bytes", "afterglow:chunk_read_bytes", "counter", "Bytes that they read."),
    Row("store_chunk_read_seconds", "afterglow:chunk_read_seconds", "counter", "Seconds in these reads."),
    Row("store_direct_io", "afterglow:direct_io", "gauge", "1 where reads bypass the page cache."),
    Row("store_notes_damaged", "afterglow:damaged_notes", "counter", "Notes about conversations lost to damage."),
    Row("store_save_waits", "afterglow:save_waits", "counter", "Saves that waited for room in the write buffer."),
    Row("store_save_wait_seconds", "afterglow:save_wait_seconds", "counter", "Seconds that saves waited so."),
    Row("store_orphans_swept", "afterglow:orphans_swept", "counter", "Files without a row, removed after the start."),
    Row("store_catalog_rebuilds", "afterglow:catalog_rebuilds", "counter", "Catalogs made anew from the extents."),
    *(
        Row(f"store_{name}", f"afterglow:{name}", "counter", text)
        for name, text in (
            ("disk_reads", "Reads of extents."),
            ("disk_writes", "Writes of extents."),
            ("disk_drops", "Removals of extents."),
            ("host_save_bytes", "Bytes of new KV brought to host memory."),
            ("host_save_seconds", "Seconds that took."),
            ("host_copies", "Copies within host memory."),
            ("host_copy_bytes", "Bytes copied within host memory."),
            ("host_copy_seconds", "Seconds that took."),
        )
    ),
)

# The same as another number, under the name that it has in the plan or in the store.
REPEATED = frozenset({
    "plan_running", "plan_waiting", "plan_extents", "plan_preemptions", "plan_failed_loads", "plan_query_tokens",
    "plan_hit_device", "plan_hit_host", "plan_hit_disk", "plan_evicted_host", "plan_evicted_disk",
    "plan_evicted_device", "plan_damaged", "plan_store_failures", "plan_rows_unsaved", "plan_device_rows",
    "plan_device_rows_total", "plan_host_slots", "plan_host_slots_total", "plan_disk_bytes", "plan_disk_bytes_total",
    "store_disk_read_bytes", "store_disk_read_seconds", "store_disk_write_bytes", "store_disk_write_seconds",
    "store_disk_bytes", "importance_read_bytes",
})  # fmt: skip

ROWS = (
    Row("running", "vllm:num_requests_running", "gauge", "Requests in the running batch."),
    Row("waiting", "vllm:num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    Row("prompt_tokens", "vllm:prompt_tokens", "counter", "Prompt tokens, cached ones included."),
    Row("generation_tokens", "vllm:generation_tokens", "counter", "Generated tokens."),
    Row("prompt_tokens", "vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the cache."),
    Row("prefilled_tokens", "afterglow:prefilled_tokens", "counter", "Prompt tokens that were computed."),
    Row("extents", "afterglow:extents", "gauge", "Stored extents."),
    Row("steps", "afterglow:steps", "counter", "Steps of the engine."),
    Row("plan_seconds", "afterglow:plan_seconds", "counter", "Time spent on planning and bookkeeping."),
    Row("forward_seconds", "afterglow:forward_seconds", "counter", "Time spent on forward passes."),
    Row("load_bytes", "vllm:kv_offload_load_bytes", "counter", "Bytes of KV read from disk."),
    Row("load_seconds", "vllm:kv_offload_load_time", "counter", "Seconds spent on reading KV."),
    Row("store_bytes", "vllm:kv_offload_store_bytes", "counter", "Bytes of KV written to disk."),
    Row("store_seconds", "vllm:kv_offload_store_time", "counter", "Seconds spent on writing KV."),
    Row("damaged_extents", "afterglow:damaged_extents", "counter", "Extents dropped for damage."),
    Row("damaged_responses", "afterglow:damaged_responses", "counter", "Stored responses and replies, or whole files of them, "
        "dropped for damage."),
    Row("load_failures", "afterglow:load_failures", "counter", "Failed reads of KV: rows were recomputed."),
    Row("store_failures", "afterglow:store_failures", "counter", "Failed writes of KV: rows are forgotten."),
    Row("unsaved_rows", "afterglow:unsaved_rows", "counter", "New rows for which no host memory was free."),
    Row("preemptions", "vllm:num_preemptions", "counter", "Running requests put back into the queue."),
    Row("importance_requests", "afterglow:importance_requests", "counter", "Requests that attended to a part of their cached "
        "prefix."),
    Row("importance_layers", "afterglow:importance_layers", "counter", "Layers in which rows were selected."),
    Row("importance_fallbacks", "afterglow:importance_fallback_layers", "counter", "Layers of them in which the probe heads "
        "disagreed, so that all keys were read."),
    Row("importance_rows_of", "afterglow:importance_rows", "counter", "Rows of prefixes in all layers, by whether they were "
        "kept.", _by("which", "all")),
    Row("importance_rows_kept", "afterglow:importance_rows", "counter", "Rows of prefixes in all layers, by whether they were "
        "kept.", _by("which", "kept")),
    Row("importance_renewals", "afterglow:importance_renewals", "counter", "Layers that selected anew while decoding."),
    Row("importance_renewed_rows", "afterglow:importance_renewed_rows", "counter", "Rows whose keys or values were loaded for "
        "that."),
    Row("importance_failed_renewals", "afterglow:importance_failed_renewals", "counter", "Layers that could not load what "
        "they selected anew, and went on with what they had."),
    *(
        Row(f"tally_{what}", "afterglow:speculative_bytes", "counter", "Bytes of chunks that were guessed for the next layer, "
            "or should have been.", _by("outcome", what))
        for what in ("predicted", "cancelled", "hit", "late", "wasted", "missing")
    ),
    Row("importance_waited", "afterglow:importance_wait_seconds", "counter", "Time in which layers waited for chunks."),
    Row("importance_mapping", "afterglow:importance_mapping_seconds", "counter", "Time of mapping rows to chunks."),
    Row("importance_identifying", "afterglow:importance_identification_seconds", "counter", "Time of finding out what is "
        "important."),
    Row("importance_reordered", "afterglow:importance_reordered_extents", "counter", "Extents whose rows were put in another "
        "order."),
    Row("relay_groups", "afterglow:relay_groups", "counter", "Groups of requests that read rows together, over steps."),
    Row("relay_levels", "afterglow:relay_levels", "gauge", "Levels of such groups, one within another, at most so far."),
    Row("relay_rows_read", "afterglow:relay_rows", "counter", "Rows of KV in one layer, by whether a group read them or "
        "need not read them again.", _by("what", "read")),
    Row("relay_rows_saved", "afterglow:relay_rows", "counter", "Rows of KV in one layer, by whether a group read them or "
        "need not read them again.", _by("what", "saved")),
    *(
        Row(f"cached_tokens_{tier}", "vllm:prompt_tokens_cached_by_source", "counter",
            "Prompt tokens that were not computed, by the tier they were in.", _by("source", tier))
        for tier in ("device", "host", "disk")
    ),
    *(
        Row(f"requests_{reason}", "vllm:request_success", "counter", "Finished requests.",
            _by("finished_reason", reason))
        for reason in ("stop", "length")
    ),
    *(
        Row(f"requests_{reason}", "afterglow:requests_unfinished", "counter", "Requests that ended early.",
            _by("reason", reason))
        for reason in ("cancelled", "error")
    ),
    *(
        Row(f"{tier}_{what}_bytes", f"afterglow:tier_{what}_bytes", "gauge",
            f"Bytes of KV a tier {'holds' if what == 'used' else 'may hold'}.", _by("tier", tier))
        for what in ("used", "capacity")
        for tier in ("device", "host", "disk")
    ),
    *(
        Row(f"{tier}_evictions", "afterglow:evictions", "counter", "Evictions.", _by("tier", tier))
        for tier in ("device", "host", "disk")
    ),
    *PLAN_ROWS,
    *STORE_ROWS,
)  # fmt: skip
