"""The simulator's options by name: flags of the command line, which a sweep may change. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from afterglow.choices import PolicyName
from afterglow.config import check_choices, option, parse_size
from afterglow.errors import ConfigError

PaceName = Literal["closed", "open"]
ModeName = Literal["reuse", "recompute", "overflow"]
RouterName = Literal["random", "least-loaded", "conversation", "prefix"]
DtypeName = Literal["float32", "bfloat16", "float16", "int8"]
MAX_ENGINES = 10_000


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Who asks what, and when."""

    format: str | None = option(
        None, "Read the trace as afterglow, mooncake, agentic or azure. The default is to find out."
    )
    skip_bad: bool = option(False, "Leave out lines of a trace that cannot be read, instead of ending there.")
    conversations: int | None = option(
        None, "End after so many conversations. The default is all of a trace, and 9,000 of a preset."
    )
    rate: float | None = option(
        None,
        "Begin so many conversations per second, as a Poisson process. The default is 1 for presets, and 0.1 for traces "
        "without absolute times; other traces have their own.",
    )
    think: float = option(
        60.0, "Let the users of presets think for so many seconds between turns, in the mean; traces say it themselves."
    )
    pace: PaceName = option(
        "closed",
        "closed: a turn comes when the one before has been answered and its user has thought. open: at the time that the "
        "trace says, whatever became of the one before.",
    )
    seed: int = option(0, "Make another workload of the same kind with another number.")
    warm_up: int = option(0, "Leave the first so many turns out of the figures; the papers leave out 10,000.")

    def __post_init__(self) -> None:
        check_choices(self)
        _at_least(self, 1, "conversations")
        _at_least(self, 0, "warm_up", "think")
        if self.rate is not None:
            _above(self, 0, "rate")


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The model, what it runs on, and how it is used; without the sizes that `plan` looks for."""

    model: str = option(
        "LLaMA-13B",
        "The model: a name of the catalogue such as LLaMA-2-70B, Llama-3-8B or Mistral-7B (an unknown one is answered with "
        "all), a config.json, or a folder with one.",
    )
    hardware: str = option("A100-80G", "The device: A100-80G, A100-PCIE-40G, A40, H100, H200, L40S or CPU-2.")
    dtype: DtypeName = option("float16", "Dtype of weights, keys and values.")
    kv_dtype: DtypeName | None = option(
        None,
        "Dtype of keys and values in host memory and on disk, int8 with a scale for each row and head; default: --dtype.",
    )
    disk_bandwidth: float = option(5.0, "Speed of the disk, reading and writing, in gigabytes (10^9 bytes) per second.")
    host_link: float | None = option(
        None, "Speed between host and device, in gigabytes per second and direction. The default is the hardware's."
    )
    policy: PolicyName = option("lookahead", "Eviction policy; lookahead also fetches ahead.")
    mode: ModeName = option(
        "reuse",
        "reuse: keep everything. recompute: keep nothing, the papers' RE. overflow: lose a context's cached rows when it is "
        "truncated, the papers' OF.",
    )
    max_batch: int = option(24, "Requests that run at the same time (the papers' 24).")
    prefill_chunk: int = option(
        512, "Prompt tokens per step while others decode; 0 lets a prefill block decoding, as in the papers."
    )
    window: int | None = option(None, "Longest context in tokens. The default is the model's.")
    ttl: float | None = option(None, "Seconds after its last use at which KV is erased. The default is never.")
    retain: bool = option(True, "Keep finished contexts on the device while there is room; the papers keep none there.")
    prices: str | None = option(
        None,
        "Price list: cachedattention, relayattention, aws, or a TOML or JSON file of your own. The default is the first of "
        "these that has the device, and no costs if none has.",
    )
    calibration: Path | None = option(
        None, "Take times and speeds from this file of afterglow bench calibrate. The default is to model them."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _above(self, 0, "disk_bandwidth", "host_link", "ttl")
        _at_least(self, 1, "max_batch", "window")
        _at_least(self, 0, "prefill_chunk")


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """How much of everything one engine has."""

    devices: int = option(2, "Devices that share the model's weights.")
    dram: int = option(128 * 2**30, "Bytes of host memory for KV.", size=True)
    disk: int = option(10 * 2**40, "Bytes of disk for KV; 0 is none.", size=True)

    def __post_init__(self) -> None:
        _at_least(self, 1, "devices")
        _at_least(self, 0, "dram", "disk")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Several engines of the same kind."""

    engines: int = option(1, "Engines, each with devices, host memory and a disk of its own.")
    router: RouterName = option(
        "conversation",
        "Which engine gets a turn. random: any. least-loaded: the one with the fewest turns. conversation: always the same "
        "for a conversation. prefix: the one that was sent the longest beginning of the prompt before, unless it is much "
        "busier than others.",
    )
    shared_tier: int = option(0, "Bytes of a store that all engines write to and read from; 0 is none.", size=True)
    network: float = option(12.5, "Speed of each engine's network link, in gigabytes per second and direction.")

    def __post_init__(self) -> None:
        check_choices(self)
        _at_least(self, 1, "engines")
        _at_least(self, 0, "shared_tier")
        _above(self, 0, "network")
        if self.engines > MAX_ENGINES:
            raise ConfigError(f"--engines must be at most {MAX_ENGINES}, got {self.engines}")


@dataclass(frozen=True, kw_only=True)
class GoalConfig:
    """The goal of the search for the cheapest engine, and how far to look."""

    hit_rate: float | None = option(
        None,
        "Share of the history of conversations that must come from the cache, 0 to 1 (of all prompt tokens, in traces "
        "without conversations). The default is none wanted.",
    )
    ttft: float | None = option(None, "Seconds to the first token that must be kept. The default is none wanted.")
    ttft_of: Literal["mean", "p50", "p99"] = option("p99", "Which time to the first token --ttft is.")
    max_devices: int = option(8, "Try up to so many devices: the fewest that hold the model, then powers of two.")
    max_dram: int = option(2 * 2**40, "Bytes of host memory to try at most.", size=True)
    max_disk: int = option(
        64 * 2**40, "Bytes of disk to try at most; no more than the whole workload leaves is tried.", size=True
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.hit_rate is None and self.ttft is None:
            raise ConfigError("a plan needs a goal: --hit-rate, --ttft, or both")
        if self.hit_rate is not None and not 0 < self.hit_rate <= 1:
            raise ConfigError(f"--hit-rate must lie between 0 and 1, got {self.hit_rate:g}; 90 % are 0.9")
        _above(self, 0, "ttft")
        _at_least(self, 1, "max_devices")
        _at_least(self, 0, "max_dram", "max_disk")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation: `workload` is a trace file or the name of a preset."""

    workload: str
    source: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineModel = field(default_factory=EngineModel)
    tiers: TierConfig = field(default_factory=TierConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def with_values(self, **values: Any) -> Scenario:
        """Copy the scenario with other options; they are checked again. Raises: ConfigError."""
        parts = {}
        for part in ("source", "engine", "tiers", "cluster"):
            config = getattr(self, part)
            own = {f.name: values[f.name] for f in fields(config) if f.name in values}
            if own:
                parts[part] = replace(config, **own)
        return replace(self, **parts)

    def value(self, name: str) -> Any:
        """An option's value."""
        return next(getattr(c, name) for c in (self.source, self.engine, self.tiers, self.cluster) if hasattr(c, name))


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def option_kinds() -> dict[str, tuple[Any, bool]]:
    """Every option of a simulation: its type, and whether it is a size in bytes."""
    found: dict[str, tuple[Any, bool]] = {}
    for config in (WorkloadConfig, EngineModel, TierConfig, ClusterConfig):
        hints = get_type_hints(config)
        for f in fields(config):
            found[f.name] = hints[f.name], "size" in f.metadata
    return found


def parse_option(name: str, text: str) -> Any:
    """Parse a value as it is written on the command line. Raises: ConfigError."""
    kind, size = option_kinds()[name]
    if size:
        return parse_size(text)
    if get_origin(kind) in (UnionType, Union):  # X | None; of a Literal it is a Union
        if text.lower() == "none":
            return None
        kind = get_args(kind)[0]
    if kind is bool:
        truth = {"yes": True, "true": True, "no": False, "false": False}
        if text.lower() not in truth:
            raise ConfigError(f"{flag(name)} is yes or no, not {text!r}")
        return truth[text.lower()]
    if kind is Path:
        return Path(text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{flag(name)}: {text!r} is not a {'whole ' * (kind is int)}number") from None
    return text


def _at_least(config: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < inf:
            raise ConfigError(f"{flag(name)} must be {least:g} or more, got {value:g}")


def _above(config: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value > least and isfinite(value)):
            raise ConfigError(f"{flag(name)} must be more than {least:g}, got {value:g}")
