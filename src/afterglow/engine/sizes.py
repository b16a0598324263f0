"""Turn the budgets of the configuration, in bytes, into the plan's units: rows, slots, and bytes of files."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from afterglow.choices import SizeOrAuto
from afterglow.config import BLOCK_ROWS, DEVICE_CACHE, MAX_EXTENT_ROWS, CacheConfig, EngineConfig, format_size
from afterglow.engine.hardware import free_on
from afterglow.engine.prefill_pass import LAYERS, MOST_RESULTS, ROWS
from afterglow.engine.tee import FLUSH_ROWS
from afterglow.errors import ConfigError
from afterglow.kernels.device_products import PIECE
from afterglow.model.decoder import Decoder
from afterglow.model.spec import ModelSpec
from afterglow.plan.batching.compose import IDLE_PREFILL
from afterglow.plan.options import Capacity, Held
from afterglow.store.database import catalog
from afterglow.store.database.connection import relic_bytes
from afterglow.store.database.conversations import FILE as CONVERSATIONS
from afterglow.store.database.conversations import MAX_BYTES as MAX_CONVERSATION_BYTES
from afterglow.store.database.conversations import footprint
from afterglow.store.extents.layout import KV_DTYPES, KVLayout
from afterglow.store.extents.tier import arena_bytes
from afterglow.store.namespace.namespace import Namespace

log = logging.getLogger("afterglow.engine")

MOVER_THREADS = 2  # that read and write extents
MIN_HOST_SLOTS = 8
MIN_DEVICE_ROWS = 4 * BLOCK_ROWS
READ_BUFFER_PART = 16  # of the device's budget, rows that are read ahead have a sixteenth
READ_BUFFER_BYTES = 1 << 30  # and at most this: what a bus brings in the time of two or three steps
FREE_PART = 0.9  # of a device's free memory; the rest is for what libraries and fragments take
GROWN = 3  # graphs of all sizes take so many times as much memory as the largest
DRAWING = 3  # float32 numbers for each logit, while tokens are drawn: logits, sorted, and probabilities


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hold what device and host memory take. `context_bytes`, `chunk_bytes`, `read_buffer_bytes`: of contexts, of chunks of prefixes that
    are selected from, and of rows that are read ahead, on the device. `kv_dtype`: of rows in host and on disk, as `--kv-dtype` names it. `max_model_len`: tokens of the longest context
    that the device can hold. `held`: the rows of it in each layer. `max_batch`, `prefill_chunk`: as the options say, or as fits the device."""

    context_bytes: int
    chunk_bytes: int
    device_rows: int
    device_row_bytes: int
    host_slots: int
    host_block_bytes: int
    kv_dtype: str
    max_model_len: int
    held: Held
    max_batch: int
    prefill_chunk: int
    read_buffer_bytes: int = 0


def sizes(config: EngineConfig, decoder: Decoder, layout: KVLayout) -> Sizes:
    """Divide the budgets for device and host memory by what a row and a block take there.

    Raises: ConfigError, for budgets that are too small.
    """
    spec, cache = decoder.spec, config.cache
    row_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * decoder.dtype.itemsize
    batch, chunk = config.batch_on(decoder.device.type), config.chunk_on(decoder.device.type)
    held = held_rows(spec, config, chunk)
    widened = decoder.quantization != "none"
    needed = pass_bytes(spec, decoder.dtype, batch, chunk, widened=widened)
    recorded = recorded_bytes(spec, decoder.dtype, layout.row_bytes, widened=widened)
    budget = _device_bytes(cache.device_cache, decoder, needed + recorded)
    block_bytes = arena_bytes(layout, 1)
    extents = 1 - config.importance_share if layout.probe_heads else 1.0  # the rest of each budget is for chunks
    host_slots = int(cache.host_cache * extents) // block_bytes if cache.reuse else 0
    buffer_bytes = read_buffer_bytes(config, decoder, int(budget * extents))
    context_bytes = int(budget * extents) - buffer_bytes
    device_rows = _device_rows(
        context_bytes, row_bytes, fitted=decoder.device.type == "cuda" and cache.device_cache == "auto"
    )
    if cache.reuse:
        _check_host(cache, host_slots, block_bytes, device_rows)
    return Sizes(
        context_bytes,
        int(budget * config.importance_share) if layout.probe_heads else 0,
        device_rows,
        row_bytes,
        host_slots,
        block_bytes,
        KV_DTYPES[layout.dtype],
        _max_model_len(spec, config, held, device_rows),
        held,
        batch,
        chunk,
        buffer_bytes,
    )


def read_buffer_bytes(config: EngineConfig, decoder: Decoder, budget: int) -> int:
    """Return the part of the device's budget for rows of the next request (see `engine.read_buffer`): whole blocks of a layer's rows.

    There is none on a CPU, which reads host memory as fast; for models with sliding windows, whose layers take different rows; where an
    option leaves it out; and where it would leave no room for the longest context that was asked for.
    """
    spec, cache = decoder.spec, config.cache
    wanted = cache.reuse and cache.preload == "layerwise" and cache.read_buffer != 0
    if decoder.device.type == "cpu" or spec.window is not None or not wanted:
        return 0
    row_bytes = 2 * spec.kv_heads * spec.head_dim * decoder.dtype.itemsize
    size = min(budget // READ_BUFFER_PART, READ_BUFFER_BYTES) // (BLOCK_ROWS * row_bytes) * BLOCK_ROWS * row_bytes
    rows = (budget - size) // (row_bytes * spec.layers) // BLOCK_ROWS * BLOCK_ROWS
    return size if rows >= max(MIN_DEVICE_ROWS, config.max_model_len or 0) else 0


def reserved_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes of keys and values for which a model's weights must leave room. On CUDA `auto` takes what they leave."""
    cache = config.cache
    if device.type == "cuda":
        return 0 if cache.device_cache == "auto" else cache.device_cache
    return cache.host_cache + (DEVICE_CACHE if cache.device_cache == "auto" else cache.device_cache)


def pass_bytes(
    spec: ModelSpec, dtype: torch.dtype, max_batch: int, prefill_chunk: int, *, widened: bool = False
) -> int:
    """Compute about how much device memory a pass of the largest prefill needs, beside the decodes of all other requests.

    A row has, in `dtype`: four times `hidden` (the stream, its norm, and what attention and the MLP add); the MLP's intermediate numbers
    (gate, up and their product; two where nothing is gated); queries, keys and values before and after the rotation, and attention's
    output in float32 or twice in 16 bits. Rows are 2,048, or `--prefill-chunk`, and one for each request. Each request also has logits,
    in `dtype` and DRAWING times in float32, and FLUSH_ROWS rows of all layers that wait to leave for host. `widened`: PIECE weights at a time are widened, twice in
    float32 and then in `dtype`.
    """
    row = _row_numbers(spec)
    waiting = FLUSH_ROWS * spec.layers * 2 * spec.kv_heads * spec.head_dim
    request = spec.vocab * (dtype.itemsize + 4 * DRAWING) + waiting * dtype.itemsize
    piece = PIECE * (8 + dtype.itemsize) if widened else 0
    return int(piece + (max(IDLE_PREFILL, prefill_chunk) + max_batch) * row * dtype.itemsize + max_batch * request)


def recorded_bytes(spec: ModelSpec, dtype: torch.dtype, row_bytes: int, *, widened: bool = False) -> int:
    """Compute about how much device memory the graphs of steps with few rows keep (see `engine.prefill_pass`): what graphs hand on, and
    what they compute with: GROWN times what the largest does, since one finds no room in the memory of smaller ones. `row_bytes`: of a row's keys, or values, in a layer,
    as they are stored. `widened`: as for `pass_bytes`."""
    layers = min(LAYERS, spec.layers)
    handed_on = ROWS[-1] * (2 * spec.hidden * dtype.itemsize + 2 * layers * 2 * row_bytes)
    results = MOST_RESULTS * spec.heads * (spec.head_dim + 1) * 4
    piece = PIECE * (8 + dtype.itemsize) if widened else 0
    return int(handed_on + GROWN * ROWS[-1] * _row_numbers(spec) * dtype.itemsize + results + piece)


def _row_numbers(spec: ModelSpec) -> int:
    """Count the numbers that a row takes in a pass: see `pass_bytes`."""
    wide = max((spec.ffn, *((spec.experts.ffn, spec.experts.shared_ffn) if spec.experts is not None else ())))
    heads = 2 * (spec.heads + 2 * spec.kv_heads) + 2 * spec.heads
    return int(4 * spec.hidden + (3 if spec.gated_mlp else 2) * wide + heads * spec.head_dim)


def held_rows(spec: ModelSpec, config: EngineConfig, prefill_chunk: int) -> Held:
    """Return what contexts hold on the device. Layers with a window hold all rows where no context is longer than those they
    would keep."""
    if spec.window is None:
        return Held(spec.layers)
    # Whole pages are taken, and so they are counted.
    most = -(-Held.most_of(spec.window, prefill_chunk) // BLOCK_ROWS) * BLOCK_ROWS
    windowed = len(windowed_layers(spec)) if spec.context(config.max_model_len) > most else 0
    return Held(spec.layers, windowed, most if windowed else 0)


def windowed_layers(spec: ModelSpec) -> tuple[int, ...]:
    """List the layers whose queries see the last rows alone."""
    return tuple(layer for layer in range(spec.layers) if spec.window_of(layer))


def capacity(
    size: Sizes, config: EngineConfig, layout: KVLayout, namespace: Namespace | None, windowed: int, bus: float
) -> Capacity:
    """Describe the tiers to the plan. There is no disk tier without a namespace. `windowed`: layers with a sliding window. `bus`: bytes/s
    from host to the device, where it has a read buffer; else 0."""
    disk_bytes = 0
    if namespace is not None:
        disk_bytes = extent_bytes(config.cache.disk_cache, namespace, layout, rewriting_bytes(config, layout))
    return Capacity(
        device_rows=size.device_rows,
        host_slots=size.host_slots,
        disk_bytes=disk_bytes,
        file_bytes=tuple(
            layout.file_bytes(blocks * BLOCK_ROWS) for blocks in range(1, MAX_EXTENT_ROWS // BLOCK_ROWS + 1)
        ),
        layers=layout.layers,
        readers=MOVER_THREADS,
        window_block_bytes=windowed * 2 * layout.chunk_bytes,
        window_layers=size.held.windowed,
        window_rows=size.held.most,
        read_buffer_rows=size.read_buffer_bytes * layout.layers // size.device_row_bytes,
        read_row_seconds=size.host_block_bytes / (BLOCK_ROWS * layout.layers) / bus if bus else 0.0,
    )


def extent_bytes(disk_cache: int, namespace: Namespace, layout: KVLayout, rewriting: int = 0) -> int:
    """Compute the share of the disk budget that is left for extents.

    Stored conversations, copies of damaged catalogs, and a file that is being rewritten (`rewriting` bytes) take the rest.
    Raises: ConfigError, if no extent had room even without damaged catalogs.
    """
    damaged = relic_bytes(namespace.catalog) + relic_bytes(namespace.path / CONVERSATIONS)
    left = disk_cache - footprint(conversation_bytes(disk_cache)) - rewriting
    if catalog.budget(max(0, left), layout.file_bytes(1)) < layout.file_bytes(1):
        raise ConfigError(
            f"--disk-cache {format_size(disk_cache)} has no room for {BLOCK_ROWS} tokens of this model "
            f"({format_size(layout.file_bytes(1))}) beside the catalog; give it more, or 0 for none"
        )
    return catalog.budget(max(0, left - damaged), layout.file_bytes(1))


def rewriting_bytes(config: EngineConfig, layout: KVLayout) -> int:
    """Compute how many bytes the new version of an extent's file may take beside the old one. One file is rewritten at a
    time; extents whose files are larger are not rewritten."""
    if not (layout.probe_heads and config.reorder_interval):
        return 0
    return min(layout.file_bytes(MAX_EXTENT_ROWS), config.cache.disk_cache // 16)


def conversation_bytes(disk_cache: int) -> int:
    """Compute the share of the disk budget for stored conversations."""
    return min(MAX_CONVERSATION_BYTES, disk_cache // 16)


def _device_bytes(wanted: SizeOrAuto, decoder: Decoder, needed: int) -> int:
    """Return the budget of keys and values on the device. `needed`: bytes of a pass, which `auto` leaves free on CUDA."""
    device = decoder.device
    if device.type != "cuda":
        return DEVICE_CACHE if wanted == "auto" else wanted
    free = free_on(device)
    if wanted == "auto":
        size = max(0, int(FREE_PART * free) - needed)
        log.info(
            "%s has %s free beside the weights: --device-cache is %s, and a pass may take %s",
            *(device, format_size(free), format_size(size), format_size(needed)),
        )
        return size
    if wanted > free:
        raise ConfigError(
            f"--device-cache {format_size(wanted)} is more than the {format_size(free)} that {device} has free beside the weights; give it "
            "less, or auto"
        )
    return wanted


def _device_rows(budget: int, row_bytes: int, *, fitted: bool) -> int:
    """Return how many tokens the device holds. `fitted`: the budget is what is free. Raises: ConfigError."""
    rows = budget // row_bytes // BLOCK_ROWS * BLOCK_ROWS
    if rows < MIN_DEVICE_ROWS and fitted:
        raise ConfigError(
            f"the weights, and a pass of --max-batch requests, leave {format_size(budget)} of the device free for keys and values, which is "
            f"{rows} tokens of this model ({format_size(row_bytes)} each) and has to be {MIN_DEVICE_ROWS}; use --quantization int8 or int4, "
            "a smaller --max-batch, or a smaller model"
        )
    if rows < MIN_DEVICE_ROWS:
        raise ConfigError(
            f"--device-cache {format_size(budget)} holds {rows} tokens of this model "
            f"({format_size(row_bytes)} each); give it at least {format_size(MIN_DEVICE_ROWS * row_bytes)}"
        )
    return rows


def _check_host(cache: CacheConfig, slots: int, block_bytes: int, device_rows: int) -> None:
    """Refuse a host tier that is too small: rows that are not saved there can be reused from nowhere."""
    if slots < MIN_HOST_SLOTS:
        raise ConfigError(
            f"--host-cache {format_size(cache.host_cache)} holds {slots} blocks of this model ({format_size(block_bytes)} each);"
            f" give it at least {format_size(MIN_HOST_SLOTS * block_bytes)}, or switch reuse off with --no-reuse"
        )
    if slots * BLOCK_ROWS < device_rows and not cache.disk_cache:
        log.info(
            "--host-cache holds %d tokens and --device-cache %d, and there is no --disk-cache: what leaves host for want of room "
            "leaves the device too",
            slots * BLOCK_ROWS,
            device_rows,
        )


def _max_model_len(spec: ModelSpec, config: EngineConfig, held: Held, device_rows: int) -> int:
    longest = spec.context(config.max_model_len)
    room = held.longest(device_rows) // BLOCK_ROWS * BLOCK_ROWS
    if longest <= room:
        return longest
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {longest} does not fit --device-cache, which holds {room} tokens")
    log.warning("contexts are limited to the %d tokens that --device-cache holds", room)
    return room
