"""What one plan is given: the sizes of its tiers, and the options that choose its behaviour. A journal holds both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from afterglow.choices import KVSource, PolicyName, Preload, ReadBuffer, TruncationPolicy, WritePolicy

MERGED_ROWS = 256  # extents with fewer rows are merged
# Reads through a window begin at a multiple, and so do held rows: a query's rows are then always divided alike.
STRIDE = 256
STEP = 512  # new rows of a step that fit behind a window, at least
UNLIMITED = 2**31


class Held(NamedTuple):
    """The rows that contexts hold on the device: all rows in all `layers` layers but `windowed`, which hold the last ones, at most
    `most`. The plan charges contexts by it, and the engine makes and fills them."""

    layers: int = 1
    windowed: int = 0
    most: int = 0
    stride: int = STRIDE

    @staticmethod
    def most_of(window: int, chunk: int) -> int:
        """Compute the rows that layers with a window hold: those that the window shows the first row of a step of `chunk` rows,
        and that step's."""
        return window + STRIDE + max(chunk, STEP)

    def first(self, stop: int) -> int:
        """Return the first row that layers with a window hold once rows before `stop` have been computed."""
        if not self.windowed or stop <= self.most:
            return 0
        return -(-(stop - self.most) // self.stride) * self.stride

    def step(self, start: int, window: int) -> int:
        """Return how many new rows a step may compute from row `start` on: what the window shows them stays."""
        return max(self.most - start, self.most - window - self.stride) if self.windowed else UNLIMITED

    def cost(self, rows: int) -> int:
        """Count what a context with room for `rows` rows takes, in rows of all layers."""
        if not self.windowed or rows <= self.most:
            return rows
        return -(-((self.layers - self.windowed) * rows + self.windowed * self.most) // self.layers)

    def longest(self, budget: int) -> int:
        """Return the rows of the longest context whose cost is within `budget`."""
        whole = self.layers - self.windowed
        if not self.windowed or budget <= self.most:
            return budget
        return (budget * self.layers - self.windowed * self.most) // whole if whole else UNLIMITED


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is to place things in.

    `device_rows`: rows of all device segments together. `host_slots`: blocks of the host arena. `disk_bytes`: budget
    of the disk tier, 0 switches it off. `file_bytes[b - 1]`: size of the file of an extent of `b` blocks (a table and
    not a function, so that a journal can hold it). `layers`: of the model; an extent's are loaded one after the other.
    `readers`: how many extents are loaded at a time. `window_block_bytes`: of a block in the layers with a sliding window, as
    stored; 0: loads bring all rows of all layers. `window_layers`: of the layers, those that hold no more than the last
    `window_rows` rows of a context on the device, from a multiple of `window_stride` on (see `Held`). `read_buffer_rows`: of one layer, for
    which the device has a buffer beside its contexts (see `batching.read_ahead`; 0: none). `read_row_seconds`: in which a row of one layer
    comes there from host (0: that was not measured).
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
    window_layers: int = 0
    window_rows: int = 0
    window_stride: int = STRIDE
    read_buffer_rows: int = 0
    read_row_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.max_extent_rows % self.block_rows:
            raise ValueError(f"an extent of {self.max_extent_rows} rows is not whole blocks of {self.block_rows}")
        if self.disk_bytes and len(self.file_bytes) != self.max_extent_rows // self.block_rows:
            raise ValueError(f"file_bytes needs {self.max_extent_rows // self.block_rows} sizes, one per block count")

    @property
    def held(self) -> Held:
        """Return what contexts hold on the device."""
        return Held(self.layers, self.window_layers, self.window_rows, self.window_stride)

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

    `digest`: names the model; a part of every extent's name. `read_buffer`: layers that are loaded before a job joins (None:
    all), or the form of the formula for them (see `buffers`). `relative_positions`: can cached rows move to other positions? `tenant_quota`: bytes of extents that
    a tenant may have in all tiers (None: any number). `tenant_pins`: the part of the last tier that a tenant may pin (None:
    all). `ttl`: seconds for which extents found at a restart are kept, where no job has named an end (None: for ever).
    `retain`: keep the contexts of finished jobs on the device while there is room. `relay`: tell in each step which rows its
    jobs have in common. `sliding_window`: rows that a query sees in layers with a window, whose earlier rows are not brought to the
    device (0: no layer has one). `small_rows`: extents with fewer rows are merged when a turn has ended (0: none). `shared`:
    there is a tier that other engines share. `shared_pages`: contexts with equal beginnings have pages of the device in common, also with
    jobs that run. `probe_part`: of an extent's bytes, the part that jobs which select read in any case (SPEC). `step_ahead`: a step may be launched before
    the tokens of the one before it are known. `keep_approximate`: rows of jobs that select are kept, for such jobs alone.
    """

    policy: PolicyName = "lru"
    write_policy: WritePolicy = "write_back"
    prefill_chunk: int = 256
    max_batch: int = 24
    max_model_len: int = 2**31
    digest: str = ""
    source: KVSource = "auto"
    preload: Preload = "layerwise"
    read_buffer: ReadBuffer = None
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
    shared: bool = False
    shared_pages: bool = False
    probe_part: float = 0.0
    step_ahead: bool = False
    keep_approximate: bool = False
