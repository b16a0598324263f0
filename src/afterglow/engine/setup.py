"""From a model directory and settings to the parts of an engine: sizes, memory, store, plan, runner."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS, MAX_EXTENT_ROWS, PINNED, EngineConfig, default_cache_dir, format_size
from afterglow.engine.important import Important
from afterglow.engine.runner import Runner, TorchRunner
from afterglow.engine.scores import Scores
from afterglow.engine.stats import RelayCounts
from afterglow.errors import ConfigError, StoreError
from afterglow.importance.identify import Rules
from afterglow.importance.loader import Loader
from afterglow.importance.shelf import Shelf
from afterglow.kernels.memory import keep_freed_memory
from afterglow.model.decoder import Decoder
from afterglow.model.digest import model_digest, numeric_mode
from afterglow.model.loader import DTYPES, load_model
from afterglow.model.spec import ModelSpec
from afterglow.plan.extent import Capacity
from afterglow.plan.journal import RecordingScheduler
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.score import ScoreCache
from afterglow.plan.step import Drop
from afterglow.store import catalog, neighbours
from afterglow.store.conversations import FILE as CONVERSATIONS
from afterglow.store.conversations import MAX_BYTES as CONVERSATION_BYTES
from afterglow.store.conversations import Conversations, footprint
from afterglow.store.kvstore import KVStore
from afterglow.store.layout import KVLayout
from afterglow.store.namespace import Namespace
from afterglow.store.throttle import Throttle
from afterglow.store.tier import arena_bytes

log = logging.getLogger("afterglow.engine")

PROBE_HEADS = 3  # of each layer, the first (SPEC §IV-B)
READ_TIMEOUT = 30.0  # seconds without progress after which a read counts as lost
MOVER_THREADS = 2  # that read and write extents
SMALLEST_HOST_SLOTS = 8
SMALLEST_DEVICE_ROWS = 4 * BLOCK_ROWS
HUGE_PAGE = 2 * 1024**2

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(slots=True)
class Notify:
    """The mover's bell, and whether callers wait for the engine's thread: set once the engine exists."""

    target: Callable[[], None] = field(default=lambda: None)
    pressed: Callable[[], bool] = field(default=lambda: False)

    def __call__(self) -> None:
        self.target()


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    model_name: str
    model_dir: Path
    max_model_len: int
    vocab_size: int
    decoder: Decoder
    eos_token_ids: tuple[int, ...]
    scheduler: Scheduler
    store: KVStore
    runner: Runner
    relayed: RelayCounts
    scores: Scores | None
    important: Important | None
    notify: Notify
    device_row_bytes: int
    host_block_bytes: int
    capacity: Capacity
    conversations: Conversations
    journal: TextIO | None


def build(
    model: str | Path,
    config: EngineConfig,
    progress: Callable[[str, int, int], None] | None,
    throttle: Throttle | None = None,
    name: str | None = None,
) -> Parts:
    """Read the model, open the cache, restore what it holds. `throttle` slows the disk tier down, for benchmarks. `name`:
    what to call the model; default: as its directory.

    Errors: ModelError, ConfigError (impossible sizes, a cache directory in use or of another format).
    """
    name = name or Path(model).name or "model"
    device = choose_device(config.device)
    use_device(device)
    use_threads(config.threads)
    keep_freed_memory()
    decoder = load_model(
        model,
        dtype=config.dtype,
        device=str(device),
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        progress=functools.partial(progress, "weights") if progress else None,
    )
    spec = decoder.spec
    kv_dtype = decoder.dtype if config.kv_dtype == "auto" else DTYPES[config.kv_dtype]
    digest = model_digest(
        model,
        numeric_mode(str(decoder.dtype), str(kv_dtype), config.quantization),
        progress=functools.partial(progress, "digest of the weights") if progress else None,
    )
    probes = min(PROBE_HEADS, spec.kv_heads) if config.importance is not None else 0
    if probes:  # their keys are stored apart as well: another format, and so another namespace
        digest = hashlib.sha256(f"{digest} with {probes} probe heads".encode()).hexdigest()
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_dim, _STORED[kv_dtype], probes)
    row_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * decoder.dtype.itemsize
    shelves = config.importance_share if probes else 0.0  # of each budget
    host_slots = int(config.cache.host_cache * (1 - shelves)) // arena_bytes(layout, 1) if config.cache.reuse else 0
    device_rows = _device_rows(int(config.cache.device_cache * (1 - shelves)), row_bytes)
    if config.cache.reuse:
        _check_host(config.cache.host_cache, host_slots, arena_bytes(layout, 1), device_rows)
    max_model_len = _max_model_len(spec, config, device_rows)
    arena = allocate(arena_bytes(layout, host_slots), pin=device.type == "cuda")
    notify = Notify()
    make_store = functools.partial(
        KVStore,
        layout,
        host_slots,
        arena.numpy(),
        notify=notify,
        threads=MOVER_THREADS,
        read_timeout=READ_TIMEOUT,
        throttle=throttle,
        shares=catalog.Shares.of(config.cache.disk_cache),
    )
    with undisturbed():
        store, namespace = _open_store(name, digest, layout, make_store, config)
    if namespace is not None:
        neighbours.warn(namespace.path, config.cache.disk_cache)
    capacity = Capacity(
        device_rows=device_rows,
        host_slots=host_slots,
        disk_bytes=_extent_bytes(config.cache.disk_cache, namespace, layout, _rewriting_bytes(config, layout))
        if namespace is not None
        else 0,
        file_bytes=tuple(
            layout.file_bytes(blocks * BLOCK_ROWS) for blocks in range(1, MAX_EXTENT_ROWS // BLOCK_ROWS + 1)
        ),
        layers=spec.layers,
        readers=MOVER_THREADS,
    )
    # Who records what attention each token gets has to compute each request's weights apart.
    relay = config.relay if config.truncation_policy != "importance" else "off"
    scheduler, journal = _scheduler(
        config,
        capacity,
        policy=config.cache.policy,
        write_policy="write_through" if probes else config.cache.write_policy,  # chunks come from disk (spec S9)
        prefill_chunk=config.prefill_chunk,
        max_batch=config.max_batch,
        max_model_len=max_model_len,
        digest=digest,
        source=config.cache.source,
        preload=config.cache.preload,
        read_buffer=config.cache.read_buffer,
        relative_positions=decoder.rope is not None,
        truncation_ratio=config.truncation_ratio,
        truncation_policy=config.truncation_policy,
        tenant_quota=config.cache.tenant_quota,
        tenant_pins=PINNED if config.cache.tenant_pins is None else config.cache.tenant_pins,
        warm_start=config.cache.warm_start,
        ttl=config.cache.ttl,
        relay=relay != "off",
    )
    with undisturbed():
        useless = scheduler.restore(store.records(), time.time())
    scheduler.recall({kind: store.notes(kind) for kind in ("epoch", "session", "prefix", "ghost")})
    store.start([Drop(-1 - i, record.id, "unreachable") for i, record in enumerate(useless)])
    blocks = arena.view(kv_dtype).view(spec.layers, 2, host_slots, BLOCK_ROWS, spec.kv_heads, spec.head_dim)
    scores = Scores(decoder.device) if config.truncation_policy == "importance" else None
    important = _important(decoder, store, blocks, layout, config) if probes else None
    runner = TorchRunner(
        decoder,
        store,
        blocks,
        kv_dtype=kv_dtype,
        max_batch=config.max_batch,
        read_timeout=READ_TIMEOUT,
        scores=scores,
        relay=relay,
        important=important,
        prefill_chunk=config.prefill_chunk,
        pressed=lambda: notify.pressed(),
    )
    return Parts(
        model_name=name,
        model_dir=Path(model),
        max_model_len=max_model_len,
        vocab_size=spec.vocab,
        decoder=decoder,
        eos_token_ids=spec.eos_ids,
        scheduler=scheduler,
        store=store,
        runner=runner,
        relayed=runner.relayed,
        scores=scores,
        important=important,
        notify=notify,
        device_row_bytes=row_bytes,
        host_block_bytes=arena_bytes(layout, 1),
        capacity=capacity,
        journal=journal,
        conversations=_conversations(config.cache.disk_cache, namespace),
    )


def _important(decoder: Decoder, store: KVStore, arena: Tensor, layout: KVLayout, config: EngineConfig) -> Important:
    """For requests that take only a part of their prefix."""
    device, host = (int(b * config.importance_share) for b in (config.cache.device_cache, config.cache.host_cache))
    loader = Loader(
        arena,
        layout,
        store.chunks,
        Shelf(ScoreCache(device, host), decoder.device),
        dtype=decoder.dtype,
        timeout=READ_TIMEOUT,
        room=_rewriting_bytes(config, layout) if config.reorder_interval else None,
    )
    assert config.importance is not None
    rules = Rules(
        retention=config.importance,
        probe_heads=PROBE_HEADS,
        alpha=config.importance_alpha,
        fallback=config.importance_fallback,
    )
    return Important(decoder, loader, rules, config.importance_renew)


def _extent_bytes(disk_cache: int, namespace: Namespace, layout: KVLayout, rewriting: int = 0) -> int:
    """What is left of the disk budget for extents: conversations have a share, and so have the relics of damage, and a file
    that is being rewritten."""
    relics = catalog.relics(namespace.catalog) + catalog.relics(namespace.path / CONVERSATIONS)
    left = disk_cache - footprint(_conversation_bytes(disk_cache)) - relics - rewriting
    return catalog.budget(max(0, left), layout.file_bytes(1))


def _rewriting_bytes(config: EngineConfig, layout: KVLayout) -> int:
    """What the new version of an extent's file may take beside the old one (one at a time); larger ones are not rewritten."""
    if not (layout.probe_heads and config.reorder_interval):
        return 0
    return min(layout.file_bytes(MAX_EXTENT_ROWS), config.cache.disk_cache // 16)


def _conversation_bytes(disk_cache: int) -> int:
    return min(CONVERSATION_BYTES, disk_cache // 16)


def _conversations(disk_cache: int, namespace: Namespace | None) -> Conversations:
    if namespace is None:
        return Conversations(None)
    return Conversations(namespace.path, max_bytes=_conversation_bytes(disk_cache))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collections meanwhile: millions of objects come to stay, and would be looked at again and again.

    Afterwards they count as old, so that none of them is looked at soon. No effect where collections are off anyway.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # which moves all to the oldest generation
        gc.enable()


def allocate(num_bytes: int, pin: bool) -> Tensor:
    """A page-aligned uint8 buffer that costs memory only where it is touched (locked there at once for CUDA).

    Huge pages are asked for: a first touch of 4 KiB pages costs as much as the copy that causes it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"--host-cache {format_size(num_bytes)} cannot be had on this machine: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
    if pin:
        _pin(array)
    return torch.from_numpy(array)


def _pin(array: npt.NDArray[np.uint8]) -> None:
    """Lock memory for copies to and from CUDA devices, exactly as much as there is: torch's own pinned memory is rounded up
    to a power of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = array.ctypes.data
    error = int(runtime.cudaHostRegister(address, array.nbytes, 0))
    if error:
        raise ConfigError(
            f"--host-cache {format_size(array.nbytes)} cannot be locked in memory for copies to the device (CUDA error "
            f"{error}); give it less, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(array, runtime.cudaHostUnregister, address)


def choose_device(name: str) -> torch.device:
    """Name the device of `--device`; `auto` is the first CUDA device, where there is one. CUDA devices have a number.

    Raises: ConfigError, for a name that is none, and for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (number and not number.isdecimal()) or name.endswith(":")):
        raise ConfigError(f"--device must be cpu, cuda, cuda:N or auto, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name} was asked for, but this PyTorch sees no CUDA device; use --device cpu")
    if int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", int(number or 0))


def use_device(device: torch.device) -> None:
    """Have this thread launch on `device`: which CUDA device that is holds for one thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_threads(threads: int | None) -> None:
    """Compute with so many threads; None: as many as torch takes."""
    if threads is not None:
        torch.set_num_threads(threads)


def _device_rows(budget: int, row_bytes: int) -> int:
    rows = budget // row_bytes // BLOCK_ROWS * BLOCK_ROWS
    if rows < SMALLEST_DEVICE_ROWS:
        raise ConfigError(
            f"--device-cache {format_size(budget)} holds {rows} tokens of this model "
            f"({format_size(row_bytes)} each); give it at least {format_size(SMALLEST_DEVICE_ROWS * row_bytes)}"
        )
    return rows


def _check_host(budget: int, slots: int, block_bytes: int, device_rows: int) -> None:
    """What is not saved to host can be reused from nowhere: without a host tier there is no reuse at all."""
    if slots < SMALLEST_HOST_SLOTS:
        raise ConfigError(
            f"--host-cache {format_size(budget)} holds {slots} blocks of this model ({format_size(block_bytes)} each);"
            f" give it at least {format_size(SMALLEST_HOST_SLOTS * block_bytes)}, or switch reuse off with --no-reuse"
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
    if longest <= device_rows:
        return longest
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {longest} does not fit --device-cache, which holds {device_rows} tokens")
    log.warning("contexts are limited to the %d tokens that --device-cache holds", device_rows)
    return device_rows


def _scheduler(config: EngineConfig, capacity: Capacity, **settings: Any) -> tuple[Scheduler, TextIO | None]:
    """The plan, and the file that its inputs are recorded in, if they are."""
    if config.journal is None:
        return Scheduler(capacity, **settings), None
    try:
        journal = config.journal.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--journal {config.journal} cannot be written: {error.strerror}") from None
    return RecordingScheduler(capacity, write=lambda line: journal.write(f"{line}\n"), **settings), journal


def _open_store(
    name: str, digest: str, layout: KVLayout, store: Callable[..., KVStore], config: EngineConfig
) -> tuple[KVStore, Namespace | None]:
    """The store, and its folder if it has a disk tier and can have it. A default folder that cannot be used costs a
    warning, one that was asked for is an error."""
    if config.cache.disk_cache == 0 or not config.cache.reuse:
        return store(namespace=None), None
    folder = config.cache.cache_dir or default_cache_dir()
    namespace = None
    try:
        namespace = Namespace.open(folder, name, digest, layout)
        return store(namespace=namespace), namespace
    except StoreError as error:
        if namespace is not None:
            namespace.close()
        if config.cache.cache_dir is not None:
            raise ConfigError(f"--cache-dir {folder} cannot be used: {error}") from None
        log.warning("running without a disk tier: %s", error)
        return store(namespace=None), None
    except BaseException:
        if namespace is not None:
            namespace.close()
        raise


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
