"""One simulated engine: a model on devices, the tiers around them, and the engine's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from afterglow.choices import PolicyName, Preload, TruncationPolicy
from afterglow.config import PINNED, format_size
from afterglow.errors import ConfigError
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.scheduler import Scheduler
from afterglow.sim.executor import Machine, Saving
from afterglow.sim.machine.catalogue import Hardware, kv_room
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.machine.timing import Calibration, Roofline, Timing

Mode = Literal["reuse", "recompute", "overflow"]
HEADER_BYTES = 4096  # of an extent's file
MAX_EXTENT_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One engine. Sizes in bytes, bandwidths in bytes/s.

    `mode`: `reuse`; `recompute`: nothing is kept (RE in the papers); `overflow`: a context that is truncated loses its
    cached rows (OF). `retain`: do finished contexts stay on the device as long as there is room? The papers' do not.
    `dtype`: of weights, keys and values; `kv_dtype`: of keys and values in host and on disk, if it is another one.
    `window`: the longest context, if not the model's. `prefill_chunk`: prompt tokens beside running decodes, 0: prefills
    keep decodes waiting, as in the papers.
    """

    model: ModelShape
    hardware: Hardware
    devices: int = 1
    dtype: str = "float16"
    kv_dtype: str | None = None
    dram: int = 128 * 10**9
    disk: int = 10 * 10**12
    disk_read: float = 5e9
    disk_write: float = 5e9
    disk_latency: float = 0.0
    host_link: float | None = None  # None: the hardware's
    policy: PolicyName = "lookahead"
    mode: Mode = "reuse"
    max_batch: int = 24
    prefill_chunk: int = 512
    block_rows: int = 64
    window: int | None = None
    device_rows: int | None = None  # None: what the devices have room for
    retain: bool = True
    truncate: bool = True
    truncation_ratio: float = 0.5
    truncation_policy: TruncationPolicy = "oldest"
    ttl: float | None = None
    preload: Preload = "layerwise"
    read_buffer: int = 16
    saving: Saving = "async"
    source: Literal["auto", "load"] = "auto"
    timing: Timing | None = None  # None: from the shapes
    calibration: Calibration | None = None
    more: dict[str, Any] = field(default_factory=dict)  # other settings of the scheduler

    def __post_init__(self) -> None:
        for name in ("devices", "max_batch", "block_rows", "disk_read", "disk_write"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("dram", "disk", "prefill_chunk", "read_buffer"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.longest > self.rows_on_device:
            raise ConfigError(
                f"{self.model.name} on {self.devices} {self.hardware.name} has room for {self.rows_on_device} tokens of "
                f"keys and values, fewer than its window of {self.longest}: more devices, or a shorter window"
            )

    @property
    def row_bytes(self) -> int:
        """Keys and values of one token in host, on disk, and on the way."""
        return self.model.kv_bytes_per_token(self.kv_dtype or self.dtype)

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return self.window or self.model.window

    @property
    def rows_on_device(self) -> int:
        """Tokens whose keys and values the devices have room for."""
        if self.device_rows is not None:
            return self.device_rows
        room = kv_room(self.model, self.hardware, self.devices, self.dtype)
        return room // self.model.kv_bytes_per_token(self.dtype)

    @property
    def capacity(self) -> Capacity:
        """The tiers, in the plan's units."""
        block = self.block_rows * self.row_bytes
        slots = self.dram // block
        if self.mode != "recompute" and slots < 4:
            raise ConfigError(
                f"{format_size(self.dram)} of host memory is less than 4 blocks of {format_size(block)}; give {4 * block} or more"
            )
        most = max(1, MAX_EXTENT_ROWS // self.block_rows)
        sizes = tuple(HEADER_BYTES + block * blocks for blocks in range(1, most + 1))
        return Capacity(
            self.rows_on_device, slots, self.disk, sizes, most * self.block_rows, self.block_rows, self.model.layers
        )

    def scheduler(self) -> Scheduler:
        """The plan of this engine."""
        options = SchedulerOptions(
            policy=self.policy,
            prefill_chunk=self.prefill_chunk,
            max_batch=self.max_batch,
            max_model_len=self.longest,
            digest="simulated",
            source=self.source,
            preload=self.preload,
            relative_positions=self.mode != "overflow" and self.model.decoupled,
            truncation_ratio=self.truncation_ratio,
            truncation_policy=self.truncation_policy,
            retain=self.retain,
            shared_pages=True,
            **{"tenant_pins": PINNED} | self.more,
        )
        return Scheduler(self.capacity, options)

    def machine(self) -> Machine:
        """The links of this engine."""
        link = self.host_link if self.host_link is not None else self.hardware.host_link_bandwidth
        if self.calibration is not None:
            link = inf  # what gathering rows takes is part of the passes that were measured
        return Machine(
            self.row_bytes,
            self.model.layers,
            link,
            self.disk_read,
            self.disk_write,
            self.disk_latency,
            read_buffer=self.read_buffer,
            preload=self.preload,
            saving=self.saving,
        )

    def passes(self) -> Timing:
        """What computing takes."""
        if self.calibration is not None:
            return self.calibration.timing
        return self.timing or Roofline(self.model, self.hardware, self.devices, self.dtype)
