"""Turn the budgets of the configuration, in bytes, into the plan's units: rows, slots, and bytes of files."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from afterglow.config import BLOCK_ROWS, MAX_EXTENT_ROWS, EngineConfig, format_size
from afterglow.errors import ConfigError
from afterglow.model.decoder import Decoder
from afterglow.model.spec import ModelSpec
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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hold what device and host memory take. `kv_dtype`: of rows in host and on disk, as `--kv-dtype` names it. `max_model_len`: tokens of the longest context that the device can hold.
    `held`: the rows of it in each layer."""

    device_rows: int
    device_row_bytes: int
    host_slots: int
    host_block_bytes: int
    kv_dtype: str
    max_model_len: int
    held: Held


def sizes(config: EngineConfig, decoder: Decoder, layout: KVLayout) -> Sizes:
    """Divide the budgets for device and host memory by what a row and a block take there.

    Raises: ConfigError, for budgets that are too small.
    """
    spec, cache = decoder.spec, config.cache
    row_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * decoder.dtype.itemsize
    block_bytes = arena_bytes(layout, 1)
    extents = 1 - config.importance_share if layout.probe_heads else 1.0  # the rest of each budget is for chunks
    host_slots = int(cache.host_cache * extents) // block_bytes if cache.reuse else 0
    device_rows = _device_rows(int(cache.device_cache * extents), row_bytes)
    if cache.reuse:
        _check_host(cache.host_cache, host_slots, block_bytes, device_rows)
    return Sizes(
        device_rows,
        row_bytes,
        host_slots,
        block_bytes,
        KV_DTYPES[layout.dtype],
        _max_model_len(spec, config, device_rows),
        held_rows(spec, config),
    )


def held_rows(spec: ModelSpec, config: EngineConfig) -> Held:
    """Return what contexts hold on the device. Layers with a window hold all rows where no context is longer than those they
    would keep."""
    if spec.window is None:
        return Held(spec.layers)
    most = Held.most_of(spec.window, config.prefill_chunk)
    windowed = len(windowed_layers(spec)) if spec.context(config.max_model_len) > most else 0
    return Held(spec.layers, windowed, most if windowed else 0)


def windowed_layers(spec: ModelSpec) -> tuple[int, ...]:
    """List the layers whose queries see the last rows alone."""
    return tuple(layer for layer in range(spec.layers) if spec.window_of(layer))


def capacity(
    size: Sizes, config: EngineConfig, layout: KVLayout, namespace: Namespace | None, windowed: int
) -> Capacity:
    """Describe the tiers to the plan. There is no disk tier without a namespace. `windowed`: layers with a sliding window."""
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
    )


def extent_bytes(disk_cache: int, namespace: Namespace, layout: KVLayout, rewriting: int = 0) -> int:
    """Compute the share of the disk budget that is left for extents.

    Stored conversations, copies of damaged catalogs, and a file that is being rewritten (`rewriting` bytes) take the rest.
    """
    damaged = relic_bytes(namespace.catalog) + relic_bytes(namespace.path / CONVERSATIONS)
    left = disk_cache - footprint(conversation_bytes(disk_cache)) - damaged - rewriting
    return catalog.budget(max(0, left), layout.file_bytes(1))


def rewriting_bytes(config: EngineConfig, layout: KVLayout) -> int:
    """Compute how many bytes the new version of an extent's file may take beside the old one. One file is rewritten at a
    time; extents whose files are larger are not rewritten."""
    if not (layout.probe_heads and config.reorder_interval):
        return 0
    return min(layout.file_bytes(MAX_EXTENT_ROWS), config.cache.disk_cache // 16)


def conversation_bytes(disk_cache: int) -> int:
    """Compute the share of the disk budget for stored conversations."""
    return min(MAX_CONVERSATION_BYTES, disk_cache // 16)


def _device_rows(budget: int, row_bytes: int) -> int:
    rows = budget // row_bytes // BLOCK_ROWS * BLOCK_ROWS
    if rows < MIN_DEVICE_ROWS:
        raise ConfigError(
            f"--device-cache {format_size(budget)} holds {rows} tokens of this model "
            f"({format_size(row_bytes)} each); give it at least {format_size(MIN_DEVICE_ROWS * row_bytes)}"
        )
    return rows


def _check_host(budget: int, slots: int, block_bytes: int, device_rows: int) -> None:
    """Refuse a host tier that is too small: rows that are not saved there can be reused from nowhere."""
    if slots < MIN_HOST_SLOTS:
        raise ConfigError(
            f"--host-cache {format_size(budget)} holds {slots} blocks of this model ({format_size(block_bytes)} each);"
            f" give it at least {format_size(MIN_HOST_SLOTS * block_bytes)}, or switch reuse off with --no-reuse"
        )
    if slots * BLOCK_ROWS < device_rows:
        log.info(
            "--host-cache holds %d tokens and --device-cache %d: what leaves host for want of room leaves the device too,"
            " unless there is a disk tier",
            slots * BLOCK_ROWS,
            device_rows,
        )


def _max_model_len(spec: ModelSpec, config: EngineConfig, device_rows: int) -> int:
    longest = spec.context(config.max_model_len)
    room = held_rows(spec, config).longest(device_rows) // BLOCK_ROWS * BLOCK_ROWS
    if longest <= room:
        return longest
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {longest} does not fit --device-cache, which holds {room} tokens")
    log.warning("contexts are limited to the %d tokens that --device-cache holds", room)
    return room
