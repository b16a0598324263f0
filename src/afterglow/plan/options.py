"""What one plan is given: the sizes of its tiers, and the options that choose its behaviour. A journal holds both."""

from __future__ import annotations

from dataclasses import dataclass

from afterglow.choices import KVSource, PolicyName, Preload, TruncationPolicy, WritePolicy

MERGED_ROWS = 256  # extents with fewer rows are merged


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is to place things in.

    `device_rows`: rows of all device segments together. `host_slots`: blocks of the host arena. `disk_bytes`: budget
    of the disk tier, 0 switches it off. `file_bytes[b - 1]`: size of the file of an extent of `b` blocks (a table and
    not a function, so that a journal can hold it). `layers`: of the model; an extent's are loaded one after the other.
    `readers`: how many extents are loaded at a time. `window_block_bytes`: of a block in the layers with a sliding window, as
    stored; 0: loads bring all rows of all layers.
    """

    device_rows: int
    host_slots: int
    disk_bytes: int = 0
    file_bytes: tuple[int, ...] = ()
    max_extent_rows: int = 1024
    block_rows: int = 64
    layers: int = 1
    readers: int = 1
    window_block_bytes: int = 0

    def __post_init__(self) -> None:
        if self.max_extent_rows % self.block_rows:
            raise ValueError(f"an extent of {self.max_extent_rows} rows is not whole blocks of {self.block_rows}")
        if self.disk_bytes and len(self.file_bytes) != self.max_extent_rows // self.block_rows:
            raise ValueError(f"file_bytes needs {self.max_extent_rows // self.block_rows} sizes, one per block count")

    def blocks(self, rows: int) -> int:
        """Count the blocks that `rows` rows take."""
        return -(-rows // self.block_rows)

    def round_up(self, rows: int) -> int:
        """`rows`, in whole blocks."""
        return self.blocks(rows) * self.block_rows

    def file_size(self, rows: int) -> int:
        """Return the bytes of the file of an extent of `rows` rows (0 where there is no disk tier)."""
        return self.file_bytes[self.blocks(rows) - 1] if self.file_bytes else 0


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options of one plan.

    `digest`: names the model; a part of every extent's name. `read_buffer`: layers that are loaded before a job joins (a
    baseline; None: all). `relative_positions`: can cached rows move to other positions? `tenant_quota`: bytes of extents that
    a tenant may have in all tiers (None: any number). `tenant_pins`: the part of the last tier that a tenant may pin (None:
    all). `ttl`: seconds for which extents found at a restart are kept, where no job has named an end (None: for ever).
    `retain`: keep the contexts of finished jobs on the device while there is room. `relay`: tell in each step which rows its
    jobs have in common. `sliding_window`: rows that a query sees in layers with a window, whose earlier rows are not brought to the
    device (0: no layer has one). `small_rows`: extents with fewer rows are merged when a turn has ended (0: none).
    """

    policy: PolicyName = "lru"
    write_policy: WritePolicy = "write_back"
    prefill_chunk: int = 256
    max_batch: int = 24
    max_model_len: int = 2**31
    digest: str = ""
    source: KVSource = "auto"
    preload: Preload = "layerwise"
    read_buffer: int | None = None
    relative_positions: bool = True
    truncation_ratio: float = 0.5
    truncation_policy: TruncationPolicy = "oldest"
    tenant_quota: int | None = None
    tenant_pins: float | None = None
    warm_start: bool = False
    ttl: float | None = None
    retain: bool = True
    relay: bool = False
    sliding_window: int = 0
    small_rows: int = MERGED_ROWS
