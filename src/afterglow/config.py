"""Settings: frozen, validated once, never patched later. Derived sizes live where they are derived."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from os.path import expanduser
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import platformdirs

from afterglow.choices import (
    ChunkRows,
    DtypeName,
    ImportanceExact,
    ImportanceFallback,
    ImportanceRest,
    KVDtypeName,
    KVSource,
    PolicyName,
    Preload,
    QuantizationName,
    ReadBuffer,
    ReadBufferForm,
    RelayMode,
    SizeOrAuto,
    SpeculateMode,
    TruncationPolicy,
    WritePolicy,
)
from afterglow.errors import ConfigError

BLOCK_ROWS = 64  # rows of a chunk and of a block (SPEC §III; CachedAttention leaves it open)
MAX_EXTENT_ROWS = 1024
SCALE_BYTES = 4  # of the float32 scale that follows the numbers of each head where rows are stored in 8 bits

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Read a size in bytes: `'8G'`, `'512M'`, `'1.5Gi'` or a plain number. All units are powers of 1024.

    Raises: ConfigError.
    """
    if isinstance(text, int):
        value = text
    else:
        found = _SIZE.match(text)
        if not found:
            if text.strip().startswith("-"):
                raise ConfigError(f"a size cannot be negative, got {text!r}; write 0 or more, such as 8G")
            raise ConfigError(f"{text!r} is not a size; write a number with K, M, G or T, such as 8G")
        number = min(float(found[1]), 1e30)
        value = int(number * 1024 ** "kmgt".index(found[2].lower()) * 1024) if found[2] else int(number)
    if value > 2**62:
        raise ConfigError(f"{str(text)[:40]} is more than any machine holds")
    if value < 0:
        raise ConfigError(f"a size cannot be negative, got {text}; give 0 or more")
    return value


def format_size(num_bytes: float) -> str:
    """Write a size: `1536` -> `'1.5 KiB'`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def default_cache_dir() -> Path:
    """Return the default folder of the disk tier: the user's cache directory (XDG on Linux)."""
    return Path(platformdirs.user_cache_dir("afterglow"))


def option(default: Any, help: str, **more: Any) -> Any:
    """Make a dataclass field that is an option of the command line, with this help text.

    `more`: `size=True` for bytes that are written such as 8G; `names` instead of the field's name, such as ("--file", "-f");
    `metavar`, the name of the value in the help.
    """
    return field(default=default, metadata={"help": help, **more})


def argument(default: Any, metavar: str, help: str) -> Any:
    """Make a dataclass field that is an argument of the command line; `default` is MISSING where it must be given."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "argument": True})


def check_types(config: object) -> None:
    """Compare the numbers, switches, texts and folders of a dataclass with the types of its fields; a folder may be a str, with
    `~`. Raises: ConfigError, naming the field and its value."""
    for name, kind in get_type_hints(type(config)).items():
        kinds = get_args(kind) or (kind,)
        value = getattr(config, name)
        if Path in kinds and isinstance(value, str):
            object.__setattr__(config, name, Path(expanduser(value)))
        elif get_origin(kind) in (None, UnionType) and all(isinstance(each, type) for each in kinds):
            fits = kinds if float not in kinds else (*kinds, int)
            if not isinstance(value, fits) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join("nothing" if each is type(None) else each.__name__ for each in kinds)
                raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def check_choices(config: object) -> None:
    """Check the fields of a dataclass whose type is a Literal.

    Raises: ConfigError, which names the option.
    """
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal and getattr(config, name) not in get_args(kind):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be one of {', '.join(map(str, get_args(kind)))}, got {getattr(config, name)!r}"
            )


def check_read_buffer(layers: ReadBuffer, preload: Preload) -> None:
    """Check the size of a read buffer.

    Raises: ConfigError.
    """
    sized = layers is None or (isinstance(layers, int) and not isinstance(layers, bool) and layers >= 0)
    if not sized and layers not in get_args(ReadBufferForm):
        raise ConfigError(f"--read-buffer is auto, paper, or a number of layers, 0 or more, got {layers!r}")
    if isinstance(layers, str) and preload == "whole":
        raise ConfigError(
            f"--read-buffer {layers} is for --preload layerwise: whole waits for all layers; leave one of them out"
        )


SHARED_CACHE = 100 * 1024**3  # bytes of one model's KV in a shared store, if the operator says nothing
WRITE_BUFFER = 256 * 1024**2  # bytes of new rows that wait to be saved, at most
DEVICE_CACHE = 2 * 1024**3  # bytes of KV on a CPU, if the operator says nothing
MAX_BATCH = {"cpu": 24, "cuda": 128}  # requests, likewise
PREFILL_CHUNK = {"cpu": 512, "cuda": 2048}  # tokens, likewise: fewer leave a GPU waiting for launches
PINNED = 0.5  # of the last tier, at most, for what all tenants pin together, if the operator says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The tiers and their budgets."""

    device_cache: SizeOrAuto = option(
        "auto",
        "Bytes of ready-to-attend KV (running requests and finished contexts). auto: 2G on a CPU; on CUDA nine tenths of what is free "
        "once the weights are there, less what the largest pass needs.",
        size=True,
    )
    host_cache: int = option(4 * 1024**3, "Bytes of the host memory tier.", size=True)
    disk_cache: int = option(
        20 * 1024**3, "Bytes of the disk tier, over restarts, per model; 0 switches it off.", size=True
    )
    cache_dir: Path | None = option(None, "Folder of the disk tier; default: the user's cache directory.")
    policy: PolicyName = option(
        "lookahead", "Eviction policy; lookahead also fetches ahead what waiting requests need."
    )
    write_policy: WritePolicy = option(
        "write_back",
        "write_back: to disk on eviction and at shutdown. write_through: as soon as computed. write_through_selective: "
        "from the second use on.",
    )
    source: KVSource = option(
        "auto",
        "Where cached KV comes from: auto loads or recomputes, whichever is predicted to be faster, and selects important rows "
        "(--importance) only where that is faster still. load: always from the cache. recompute: computes cached tokens again (a baseline).",
    )
    preload: Preload = option(
        "layerwise",
        "layerwise: a layer's compute waits for that layer's KV only. whole: for the KV of all layers (a baseline).",
    )
    read_buffer: ReadBuffer = option(
        None,
        "Layers that are loaded before a request's turn comes; default: all. auto: so many that it need not wait for the others, by measured "
        "rates. paper: CachedAttention's formula, which counts one layer's computing less than auto. A number is a baseline. On CUDA "
        "so many also come from host memory to the device before that, if its buffer holds them; 0 leaves that buffer out.",
        metavar="LAYERS",
    )
    write_buffer: SizeOrAuto = option(
        WRITE_BUFFER,
        "Bytes of new KV that may wait to be saved before computing waits for it. auto: by CachedAttention's formula, from measured rates, "
        "for the prompts that are being computed; at most the default.",
        size=True,
    )
    ttl: float | None = option(
        None,
        "Seconds after its last use at which KV, and the text of replies, are erased from all tiers, unless a request says "
        "otherwise (prompt_cache_retention). Applies to KV on disk as well that has no time of its own; default: never.",
    )
    tenant_quota: int | None = option(
        None, "Bytes of KV that one tenant may have in host and on disk; default: no limit.", size=True
    )
    tenant_pins: float | None = option(
        None,
        "Part of the last tier (disk, or host without one) that one tenant may keep pinned, conversations and registered "
        "prompts together; default: half of the tier, in equal parts for all API keys.",
    )
    warm_start: bool = option(True, "After a restart, load the KV that was used most back to host memory.")
    reuse: bool = option(True, "Reuse KV; off for comparisons.")
    shared: str | None = option(
        None,
        "URL of a store that several servers share (file:///nfs/folder, s3://, gs:// or az://bucket/folder): each finds there the KV "
        "that the others have computed. Needs a disk tier, and writes through to it. Default: none.",
    )
    shared_cache: int | None = option(
        None, "Bytes of one model's KV in the shared store, of all servers together; default: 100G.", size=True
    )
    shared_directory: str | None = option(
        None,
        "Redis or Valkey server (redis://host:6379/0, rediss://, unix://) that answers where extents of the shared store are, faster than "
        "its listings; all servers of the store need the same. With a password: AFTERGLOW_SHARED_DIRECTORY. Default: none.",
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_read_buffer(self.read_buffer, self.preload)
        for name, least, unit in (("device_cache", 0, "bytes"), ("write_buffer", 1, "byte")):
            size = getattr(self, name)
            if size != "auto" and (type(size) is not int or size < least):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is auto, or a size of at least {least} {unit}, got {size!r}"
                )
        if self.ttl is not None and not self.ttl > 0:
            raise ConfigError(f"--ttl must be more than 0 seconds, got {self.ttl}")
        if self.tenant_pins is not None and not 0 <= self.tenant_pins <= 1:
            raise ConfigError(f"--tenant-pins is a part between 0 and 1, got {self.tenant_pins}")
        if self.tenant_quota is not None and self.tenant_quota < 1:
            raise ConfigError(f"--tenant-quota must be at least 1 byte, got {self.tenant_quota}")
        if self.shared is not None and not (self.disk_cache and self.reuse):
            raise ConfigError(
                "--shared brings KV to the disk tier: give it one (--disk-cache), and leave --no-reuse out"
            )
        if self.shared is not None and self.shared_cache == 0:
            raise ConfigError("--shared-cache 0 leaves the shared store no room; give it more, or leave --shared out")
        if self.shared_cache is not None and self.shared is None:
            raise ConfigError(
                "--shared-cache is the room in a shared store: name that with --shared, or leave --shared-cache out"
            )
        if self.shared_directory is not None and self.shared is None:
            raise ConfigError("--shared-directory tells where extents of a shared store are: name that with --shared")
        for name in ("host_cache", "disk_cache", "shared_cache"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} cannot be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of the engine besides the model directory."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    dtype: DtypeName = option("auto", "Compute dtype; auto is float32 on CPU and the checkpoint's on CUDA.")
    quantization: QuantizationName = option(
        "auto",
        "int8 or int4: weights in so many bits, and on CPU what they are multiplied with in 8; faster and not exact. float8: floats of "
        "8 bits (e4m3), on CUDA from compute capability 8.9 on. auto: as the files have them. none: as numbers of the compute dtype, whatever the files have.",
    )
    kv_dtype: KVDtypeName = option(
        "auto",
        "Dtype of keys and values in host memory and on disk; auto is the compute dtype (exact). int8 takes nearly a quarter of "
        "float32's bytes, with a scale for each row and head. What is reused from there has been rounded; on the device nothing is.",
    )
    device: str = option("auto", "cpu, cuda, cuda:N, or auto: CUDA where it is there and passes a short self-test.")
    max_model_len: int | None = option(None, "Longest context in tokens; default: the model's own limit.")
    max_batch: int | None = option(
        None, "Requests that run at the same time; default: 24 on a CPU (as in the papers), 128 on CUDA."
    )
    prefill_chunk: int | None = option(
        None,
        "Prompt tokens per step while others decode; 0 lets a prefill block decoding, as in the papers. Default: 512 on a CPU, 2048 "
        "on CUDA.",
    )
    max_queue: int = option(1024, "Waiting requests before new ones are refused with status 429.")
    importance: float | None = option(
        None,
        "Attend to this share of a request's cached prefix only, where it finds it important (SPEC): faster from slow disks, "
        "and an approximation, said in the usage. Where reading or computing all rows is predicted to be as fast, the answer is exact "
        "(unless --source load). 1 is exact, and lets requests ask for less (kv_retention). Default: off.",
    )
    importance_mass: float = option(
        1.0,
        "Take fewer tokens in a layer where these hold this part of its attention; --importance stays the most. 1: always as many (SPEC).",
    )
    importance_alpha: float = option(0.6, "How soon probe heads are believed (SPEC's alpha): 0 never, more: sooner.")
    importance_fallback: ImportanceFallback = option(
        "per_head",
        "Where probe heads (the few that choose the rows) disagree: per_head takes a set of rows for each head, all takes all rows.",
    )
    importance_rest: ImportanceRest = option(
        "forget",
        "Rows that a layer does not take: forget leaves them out (SPEC); means attends to the mean key and value of each 64 of them, "
        "which the files hold then: another format and folder. It helps with --importance-mass.",
    )
    importance_renew: int = option(
        1,
        "Tokens after which a reply selects rows anew, to find what its prompt did not ask for; costs time. 0: never (SPEC).",
    )
    importance_share: float = option(0.25, "Part of the device and host caches for chunks of such prefixes.")
    importance_chunk: ChunkRows = option(
        64,
        "Rows of a chunk: the least that is read and cached of such prefixes. With less than 64, files have a format and a folder of their own.",
    )
    importance_exact: ImportanceExact = option(
        "idle",
        "Compute such requests' prompts exactly for the cache as well: idle (when nothing else is to be done) or never. approximate: keep "
        "their own rows as they are, for requests that select alone; errors of turns add up.",
    )
    reorder_interval: float = option(600.0, "Seconds after which important rows are put together on disk; 0: never.")
    journal: Path | None = option(None, "File to record every input of the planner in, to replay or simulate it later.")
    truncation_ratio: float = option(
        0.5, "Part of the context window that is cut away where a conversation outgrows it (the papers' 0.5)."
    )
    truncation_policy: TruncationPolicy = option(
        "oldest",
        "Tokens to cut away; a system prompt, or else the first four tokens, stay. oldest: whole turns. oldest_tokens: that part of the "
        "window and no more, wherever turns end (the papers'). sinks_and_recent: all but the first few and the most recent tokens. "
        "importance: likewise, but half of the kept tokens are those that were attended to most; slower, as attention is recorded.",
    )
    relay: RelayMode = option(
        "auto",
        "Read rows that running requests have in common once for all requests (RelayAttention). auto: where that is faster, "
        "and never with truncation policy importance; on, off.",
    )
    speculate: SpeculateMode = option(
        "auto",
        "Guess a reply's next tokens from the request's own text, and verify several in one step: the same reply in fewer steps, "
        "where it copies. auto: as far as that pays on this machine, and never with truncation policy importance; on, off.",
    )
    threads: int | None = option(None, "Compute threads; default: the number of physical cores.")
    kv_events: str | None = option(
        None,
        "Publish which blocks of 64 tokens are in which tier at this ZeroMQ address, such as tcp://127.0.0.1:5557, in vLLM's format: "
        "for routers (pip install 'afterglow-llm[cluster]'). Hashes are published, no tokens. The default is off.",
    )
    kv_events_replay: str | None = option(
        None, "Repeat KV events that a subscriber has missed at this ZeroMQ address. The default is off."
    )
    kv_events_tokens: bool = option(
        False,
        "Publish the blocks' token ids as well: all who can connect read the prompts and replies of all tenants.",
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        limits = (("max_batch", 1, 4096), ("prefill_chunk", 0, 2**20), ("max_queue", 1, 2**20))
        for name, least, most in (*limits, ("importance_renew", 0, 2**20), ("threads", 1, 1024)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"--{name.replace('_', '-')} must lie between {least} and {most}, got {value}")
        if self.relay == "on" and self.truncation_policy == "importance":
            raise ConfigError(
                "--relay on does not go with --truncation-policy importance, which has to compute each request's attention "
                "apart; use --relay auto (nothing is shared then), or another policy"
            )
        if self.speculate == "on" and self.truncation_policy == "importance":
            raise ConfigError(
                "--speculate on does not go with --truncation-policy importance, which would record the attention of guesses too; "
                "use --speculate auto (nothing is guessed then), or another policy"
            )
        for name, address in (("--kv-events", self.kv_events), ("--kv-events-replay", self.kv_events_replay)):
            if address is not None and not address.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name} is an address such as tcp://127.0.0.1:5557 or ipc:///PATH, got {address!r}")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_tokens):
            option = "--kv-events-replay" if self.kv_events_replay is not None else "--kv-events-tokens"
            raise ConfigError(f"{option} does nothing without --kv-events; give an address there too")
        for name in ("importance", "importance_mass"):
            if (share := getattr(self, name)) is not None and not 0 < share <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} is a share, more than 0 and at most 1, got {share}")
        for each in fields(self) if self.importance is None else ():
            if each.name.startswith(("importance_", "reorder_")) and getattr(self, each.name) != each.default:
                raise ConfigError(f"--{each.name.replace('_', '-')} does nothing without --importance: give that too")
        if self.importance is not None and not self.cache.reuse:
            raise ConfigError(
                "--importance is about cached prefixes, and --no-reuse switches the cache off: use one or the other"
            )
        if self.importance is not None and self.cache.shared is not None:
            raise ConfigError(
                "--importance puts rows on disk in another order, and --shared needs them as they were computed: use one or the other"
            )
        for name in ("importance_alpha", "reorder_interval"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.importance_share < 1:
            raise ConfigError(f"--importance-share must be 0 or more and below 1, got {self.importance_share}")
        if not 0 < self.truncation_ratio < 1:
            raise ConfigError(f"--truncation-ratio must lie between 0 and 1, got {self.truncation_ratio}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len must be at least 1, got {self.max_model_len}")

    def batch_on(self, device: str) -> int:
        """Return how many requests run at the same time on a kind of device, `cpu` or `cuda`."""
        return MAX_BATCH[device] if self.max_batch is None else self.max_batch

    def chunk_on(self, device: str) -> int:
        """Return the prompt tokens of a step while others decode, on a kind of device, `cpu` or `cuda`; 0: a prefill goes alone."""
        return PREFILL_CHUNK[device] if self.prefill_chunk is None else self.prefill_chunk
