"""Build the parts of an engine from a model directory and a configuration."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torch import Tensor

from afterglow.choices import SpeculateMode
from afterglow.config import BLOCK_ROWS, PINNED, WRITE_BUFFER, EngineConfig, default_cache_dir
from afterglow.engine.gather import HostRows
from afterglow.engine.grammars.compiler import Grammars
from afterglow.engine.hardware import allocate, choose_device, copy_rate, use_device, use_threads
from afterglow.engine.inbox import Inbox
from afterglow.engine.kv_format import PROBE_HEADS, Progress, kv_dtype, kv_format, probe_part
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.make_sharing import make_sharing, shared_conversations, shared_tier
from afterglow.engine.requests import RequestLimits
from afterglow.engine.runner import TorchRunner
from afterglow.engine.scores import Scores
from afterglow.engine.selective import SelectiveAttention
from afterglow.engine.sizes import (
    MOVER_THREADS,
    Sizes,
    capacity,
    conversation_bytes,
    reserved_bytes,
    rewriting_bytes,
    sizes,
    windowed_layers,
)
from afterglow.engine.speculation.guesser import Guesser, StepCosts
from afterglow.engine.speculation.row_costs import RowCosts, attention_costs
from afterglow.engine.undisturbed import undisturbed
from afterglow.errors import ConfigError, StoreError
from afterglow.gguf_file import file_stem, is_gguf
from afterglow.importance.chunk_cache import ChunkCache, ChunkPlacement
from afterglow.importance.chunk_loader import ChunkLoader
from afterglow.importance.select import SelectionRules
from afterglow.memory.pages import keep_freed_memory
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model
from afterglow.model.spec import ModelSpec
from afterglow.plan.journal.replaying import RecordingScheduler
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import Drop
from afterglow.store.database import catalog
from afterglow.store.database.conversations import Conversations
from afterglow.store.database.notes import IMPORTANCE
from afterglow.store.extents.layout import KVLayout
from afterglow.store.extents.throttle import Throttle
from afterglow.store.extents.tier import arena_bytes
from afterglow.store.kvstore import KVStore
from afterglow.store.namespace import neighbours
from afterglow.store.namespace.namespace import Namespace

if TYPE_CHECKING:  # not at the start of an engine that shares nothing and tells nothing
    from afterglow.engine.kv_events.publisher import KVEvents
    from afterglow.engine.sharing import Sharing

log = logging.getLogger("afterglow.engine")

READ_TIMEOUT = 30.0  # seconds without progress after which a read counts as lost


@dataclass(slots=True)
class EngineParts:
    """Hold the parts of an engine. Only the engine's thread may use `scheduler` and `runner` once it runs."""

    config: EngineConfig
    model_dir: Path
    model_name: str
    decoder: Decoder
    sizes: Sizes
    limits: RequestLimits
    capacity: Capacity
    scheduler: Scheduler
    store: KVStore
    runner: TorchRunner
    grammars: Grammars
    scores: Scores | None  # for truncation by importance
    selective: SelectiveAttention | None  # for requests that attend to a part of their prefix
    conversations: Conversations
    inbox: Inbox
    kv_events: KVEvents | None
    journal: TextIO | None
    sharing: Sharing | None  # of rows with other engines
    clock: Callable[[], float]  # seconds since 1970 that never go backwards


def build(
    model: str | Path,
    config: EngineConfig,
    progress: Progress | None,
    throttle: Throttle | None = None,
    name: str | None = None,
) -> EngineParts:
    """Read the model, open the cache, and restore its contents.

    `throttle` slows the disk tier down, for benchmarks. `name` names the model; default: the name of the directory or file.
    Raises: ModelError; ConfigError, for impossible sizes and a cache directory that is in use or has another format.
    """
    if config.kv_events is not None:
        from afterglow.engine.kv_events.publisher import KVEvents, check_installed

        check_installed()
    open_shared = shared_tier(config.cache)  # what is wrong with its URL is said before the model is read
    name = name or (file_stem(Path(model)) if is_gguf(model) else Path(model).name) or "model"
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
        kv_bytes=reserved_bytes(config, device),
        progress=functools.partial(progress, "weights") if progress else None,
    )
    if config.importance is not None and not decoder.divisible:
        raise ConfigError(
            f"--importance leaves passes between layers, and model type {decoder.spec.family!r} runs through transformers in one "
            "piece; leave --importance out"
        )
    refuse_beside(decoder.spec, config)
    layout, digest = kv_format(model, decoder, config, progress)
    size = sizes(config, decoder, layout)
    arena = allocate(arena_bytes(layout, size.host_slots), pin=device.type == "cuda")
    inbox = Inbox()
    windowed = windowed_layers(decoder.spec)
    make_store = functools.partial(
        KVStore,
        layout,
        size.host_slots,
        arena.numpy(),
        notify=inbox.wake,
        threads=MOVER_THREADS,
        read_timeout=READ_TIMEOUT,
        write_buffer=WRITE_BUFFER if config.cache.write_buffer == "auto" else config.cache.write_buffer,
        throttle=throttle,
        shares=catalog.CatalogShares.of(config.cache.disk_cache),
        windowed=windowed,
        open_shared=open_shared,
    )
    with undisturbed():
        store, namespace = open_store(name, digest, layout, make_store, config)
    with contextlib.ExitStack() as undo:  # where a later part fails, the folder is given back
        undo.callback(store.close)
        if namespace is not None:
            neighbours.warn(namespace.path, config.cache.disk_cache)
        bus = copy_rate(arena[: size.read_buffer_bytes], device)  # the device will have room for so many bytes
        tiers = capacity(size, config, layout, namespace, len(windowed), bus)
        scheduler, journal = make_scheduler(config, tiers, decoder, layout, size, digest)
        if journal is not None:
            undo.callback(journal.close)
        _restore(scheduler, store)
        kv_events = KVEvents(scheduler.cache, config, digest, inbox.wake) if config.kv_events is not None else None
        if kv_events is not None:
            undo.callback(kv_events.close)
        clock = _steady_clock()
        blocks = arena.view(kv_dtype(decoder, config))
        blocks = blocks.view(layout.layers, 2, size.host_slots, BLOCK_ROWS, layout.kv_heads, layout.width)
        runner, scores, selective = make_runner(config, size, decoder, store, blocks, layout, inbox.pressed)
        if selective is not None:
            selective.loader.recall(store.notes(IMPORTANCE), store.on_disk.known_rows)
        parts = EngineParts(
            config=config,
            model_dir=Path(model),
            model_name=name,
            decoder=decoder,
            sizes=size,
            limits=RequestLimits(
                decoder.spec.vocab, size.max_model_len, scheduler.cache.rules, scheduler.cache.relative_positions
            ),
            capacity=tiers,
            scheduler=scheduler,
            store=store,
            runner=runner,
            grammars=Grammars(decoder.spec.vocab, decoder.spec.eos_ids),
            scores=scores,
            selective=selective,
            conversations=open_conversations(config.cache.disk_cache, namespace, store),
            inbox=inbox,
            kv_events=kv_events,
            journal=journal,
            sharing=make_sharing(scheduler, store, tiers, inbox, clock),
            clock=clock,
        )
        undo.pop_all()
    return parts


def refuse_beside(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse what makes attention weights by the plain formula, for models whose weights are others. Raises: ConfigError."""
    if spec.plain_scores:
        return
    what = "attention sinks" if spec.sinks else "sliding windows" if spec.score_cap is None else "soft-capped scores"
    for option, used in (
        ("--importance", config.importance is not None),
        ("--truncation-policy importance", config.truncation_policy == "importance"),
    ):
        if used:
            raise ConfigError(
                f"{option} does not go with a model of type {spec.family}, which has {what}; leave it out"
            )


def open_store(
    name: str, digest: str, layout: KVLayout, make_store: Callable[..., KVStore], config: EngineConfig
) -> tuple[KVStore, Namespace | None]:
    """Open the store, and the model's folder if there is a disk tier.

    The default cache directory costs a warning where it cannot be used: the store then has no disk tier.
    Raises: ConfigError, where a cache directory that was asked for cannot be used.
    """
    if config.cache.disk_cache == 0 or not config.cache.reuse:
        return make_store(namespace=None), None
    folder = config.cache.cache_dir or default_cache_dir()
    namespace = None
    try:
        namespace = Namespace.open(folder, name, digest, layout)
        return make_store(namespace=namespace), namespace
    except StoreError as error:
        if namespace is not None:
            namespace.close()
        if config.cache.cache_dir is not None:
            raise ConfigError(f"--cache-dir {folder} cannot be used: {error}") from None
        log.warning("running without a disk tier: %s", error)
        return make_store(namespace=None), None
    except BaseException:
        if namespace is not None:
            namespace.close()
        raise


def make_scheduler(
    config: EngineConfig, tiers: Capacity, decoder: Decoder, layout: KVLayout, size: Sizes, digest: str
) -> tuple[Scheduler, TextIO | None]:
    """Make the plan, and open the journal that records its inputs, if there is to be one.

    Raises: ConfigError, where the journal cannot be written.
    """
    cache = config.cache
    # Chunks are read from disk, so with --importance all extents go there at once.
    at_once = config.importance is not None or cache.shared is not None  # as are extents that others are to find
    write_policy = "write_through" if at_once else cache.write_policy
    options = SchedulerOptions(
        policy=cache.policy,
        write_policy=write_policy,
        prefill_chunk=size.prefill_chunk,
        max_batch=size.max_batch,
        max_model_len=size.max_model_len,
        digest=digest,
        source=cache.source,
        preload=cache.preload,
        read_buffer=cache.read_buffer,
        relative_positions=decoder.rope is not None,
        truncation_ratio=config.truncation_ratio,
        truncation_policy=config.truncation_policy,
        tenant_quota=cache.tenant_quota,
        tenant_pins=PINNED if cache.tenant_pins is None else cache.tenant_pins,
        warm_start=cache.warm_start,
        ttl=cache.ttl,
        sliding_window=decoder.spec.window or 0,
        # Recording importance computes the attention weights of each request apart.
        relay=config.relay != "off" and config.truncation_policy != "importance",
        shared_pages=True,
        shared=cache.shared is not None,
        probe_part=probe_part(layout),
        step_ahead=decoder.device.type == "cuda",
        keep_approximate=config.importance_exact == "approximate",
    )
    if config.journal is None:
        return Scheduler(tiers, options), None
    try:
        journal = config.journal.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--journal {config.journal} cannot be written: {error.strerror}") from None
    return RecordingScheduler(tiers, options, _lines_to(journal)), journal


def _lines_to(journal: TextIO) -> Callable[[str], None]:
    """Return what writes a line to the journal, until that fails: a full disk ends the journal, and not the engine."""
    ended = False

    def write(line: str) -> None:
        nonlocal ended
        if ended:
            return
        try:
            print(line, file=journal)
        except OSError as error:
            ended = True
            log.warning("--journal %s ends here: %s", journal.name, error.strerror)

    return write


def make_runner(
    config: EngineConfig,
    size: Sizes,
    decoder: Decoder,
    store: KVStore,
    blocks: Tensor,
    layout: KVLayout,
    pressed: Callable[[], bool],
) -> tuple[TorchRunner, Scores | None, SelectiveAttention | None]:
    """Make the runner, and what truncation by importance and selective attention need.

    `blocks`: the host arena, [layers, 2, slots, 64, kv_heads, stored width]. `pressed`: does a caller wait for the engine's thread?
    """
    scores = Scores(decoder.device) if config.truncation_policy == "importance" else None
    selective = _selective(config, size, decoder, store, blocks, layout) if layout.probe_heads else None
    host = HostRows(blocks, store, READ_TIMEOUT, decoder.device, pressed)
    guesser = make_guesser(config.speculate, decoder) if scores is None else None
    runner = TorchRunner(decoder, host, config, size, scores, selective, guesser)
    if decoder.device.type == "cuda" and runner.passes is None:
        log.info("steps that decode are launched kernel by kernel, not as CUDA graphs")
    return runner, scores, selective


def make_guesser(mode: SpeculateMode, decoder: Decoder) -> Guesser | None:
    """Make what guesses tokens of replies; auto: with costs measured now, in a few tenths of a second."""
    if mode != "auto":
        return Guesser(None) if mode == "on" else None
    if not decoder.divisible:  # costs are measured with some of the layers
        return None
    spec = decoder.spec
    shape = KVShape(spec.layers, spec.kv_heads, spec.head_dim, decoder.dtype, decoder.device)
    return Guesser(StepCosts(RowCosts.measured(decoder).step, *attention_costs(shape, spec.heads)))


def open_conversations(disk_cache: int, namespace: Namespace | None, store: KVStore) -> Conversations:
    """Open the store of responses that clients go on from by id; in memory where there is no disk tier."""
    if namespace is None:
        return Conversations(None)
    if store.shared is not None:
        return shared_conversations(store.shared, namespace.path, conversation_bytes(disk_cache))
    return Conversations(namespace.path, max_bytes=conversation_bytes(disk_cache))


def _restore(scheduler: Scheduler, store: KVStore) -> None:
    """Tell the plan what the store holds from before a restart, and drop extents that no prompt can reach."""
    with undisturbed():
        useless = scheduler.restore(store.records(), time.time())
    scheduler.recall({kind: store.notes(kind) for kind in ("epoch", "session", "prefix", "ghost", "mark")})
    store.start([Drop(-1 - i, record.id, "unreachable") for i, record in enumerate(useless)])


def _selective(
    config: EngineConfig, size: Sizes, decoder: Decoder, store: KVStore, blocks: Tensor, layout: KVLayout
) -> SelectiveAttention:
    host = int(config.cache.host_cache * config.importance_share)
    loader = ChunkLoader(
        blocks,
        layout,
        store.chunks,
        ChunkCache(ChunkPlacement(size.chunk_bytes, host), decoder.device),
        dtype=decoder.dtype,
        timeout=READ_TIMEOUT,
        room=rewriting_bytes(config, layout) if config.reorder_interval else None,
        chunk_rows=config.importance_chunk,
    )
    assert config.importance is not None
    rules = SelectionRules(
        retention=config.importance,
        mass=config.importance_mass,
        probe_heads=PROBE_HEADS,
        alpha=config.importance_alpha,
        fallback=config.importance_fallback,
    )
    return SelectiveAttention(decoder, loader, rules, config.importance_renew)


def _steady_clock() -> Callable[[], float]:
    """Make a clock of seconds since 1970 that never goes backwards: the catalog compares its times over restarts."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
