"""Copy cached rows from host slots to the device, layer by layer: CachedAttention §3.2.1, layer-wise pre-loading.

Each row is copied once, and its key is rotated in the same pass. On a device with its own queues of work the copies run in
a second one, ahead of the layer that is being computed, as far as the rows have come; each layer has an event, and the
computing queue waits for just that. With Triton a layer's rows are one launch (`kernels.device_gather`). On a CPU both are the calling thread, and a layer is gathered when it is its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.engine.context import DeviceContext
from afterglow.engine.stats import GatherCounters
from afterglow.kernels.device_gather import DeviceGather, SlotRows
from afterglow.kernels.rope import LayerRopes, LayerRotations, Rotation, rotate_into
from afterglow.kernels.stored_rows import widen_into
from afterglow.plan.step import ExtentId, Gather
from afterglow.store.kvstore import KVStore

LAYERS_AHEAD = 2  # of the layer being computed, on a device with work queues
STALL_SECONDS = 0.25  # how long other requests wait, in a step, for rows that they do not need
POLL_SECONDS = 0.05  # between two looks whether a caller waits
MIN_BLOCKS = 4  # in a row, on average: with shorter runs one gather into a temporary is faster than many small copies


@dataclass(slots=True)
class BatchEntry:
    """Place one run of the step in the batch: rows `where` of the flattened batch are rows [start, stop) of `context`."""

    job: int
    where: slice
    start: int
    stop: int
    context: DeviceContext
    gathers: tuple[Gather, ...] = ()
    gather_from: int = 0  # first row of the context that the gathers fill
    gather_angles: LayerRotations | None = None
    gather_at_once: DeviceGather | None = None  # on CUDA
    failed: ExtentId | None = None
    late: bool = False  # the failed extent is still on its way
    own_from: int = 0  # rows before are read together with other entries (see `engine.relay_attention`)


@dataclass(slots=True)
class HostRows:
    """Read rows from the host arena: [layers, 2, slots, 64, kv_heads, stored width], un-rotated."""

    arena: Tensor
    store: KVStore
    read_timeout: float
    device: torch.device
    pressed: Callable[[], bool] = lambda: False  # does a caller wait for the engine's thread?
    waited: dict[int, int] = field(default_factory=dict)  # by move: the last layer known to be there
    stalled: float = 0.0  # seconds of this step that other requests have waited

    @property
    def row_bytes(self) -> int:
        """Count the bytes of a row's keys, or values, in one layer."""
        return self.arena[0, 0, 0, 0].nbytes if self.arena.shape[2] else 0

    @property
    def stalls(self) -> bool:
        """Tell whether other requests have waited long enough in this step."""
        return self.stalled >= STALL_SECONDS

    def ready(self, gather: Gather, layer: int, company: bool = False, *, wait: bool = True) -> bool:
        """Tell whether `layer` of the gather's extent is in its slots. With `wait`, wait for it.

        Returns False if the load failed, or is late: it may take as long as the store waits for it, or STALL_SECONDS while
        other requests in the step (`company`) or a caller wait too.
        """
        move = gather.move
        if move is None or self.waited.get(move, -1) >= layer:
            return True
        began = now = time.monotonic()
        while not self.store.wait_layer(move, layer, POLL_SECONDS if wait else 0):
            if not wait:
                return False
            if not self.store.is_under_way(move):
                if self.store.wait_layer(move, layer, 0):  # it came between the two questions
                    break
                return False
            before, now = now, time.monotonic()
            if company or self.pressed():
                self.stalled += now - before
            if self.stalls or now - began >= self.read_timeout:
                return False
        self.waited[move] = layer
        return True

    def comes(self, gather: Gather, layer: int) -> bool:
        """Tell whether `layer` is on its way, or there by now."""
        under_way = gather.move is not None and self.store.is_under_way(gather.move)
        return under_way or self.ready(gather, layer, wait=False)

    def rows(self, gather: Gather, layer: int, which: int) -> Iterator[Tensor]:
        """Yield keys (`which` 0) or values (1) in pieces [rows, kv_heads, stored width], in order. The pieces are views of the
        slots, unless these are scattered."""
        first, last = gather.start // BLOCK_ROWS, -(-gather.stop // BLOCK_ROWS)
        slots = gather.slots[first:last]
        plane = self.arena[layer, which]
        runs = list(_runs(slots))
        if len(runs) > 1 and self.device.type == "cpu" and len(slots) < MIN_BLOCKS * len(runs):
            pieces = [plane.index_select(0, torch.tensor(slots))]
        else:
            pieces = [plane[slots[a] : slots[a] + b - a] for a, b in runs]
        skip, left = gather.start - first * BLOCK_ROWS, gather.stop - gather.start
        for blocks in pieces:
            rows = blocks.reshape(-1, *blocks.shape[2:])[skip : skip + left]
            skip, left = 0, left - len(rows)
            yield rows


def _put(rows: Tensor, place: Tensor, angles: Rotation | None = None) -> None:
    """Copy host rows to their place on the device, turned by `angles`. A change of dtype happens there: on the CPU it would cost
    time, and wait.
    """
    rows = rows.to(place.device, non_blocking=True)
    if rows.dtype == torch.int8:
        widen_into(rows, place, angles)
    elif angles is not None:
        rotate_into(rows, angles, place)
    else:
        place.copy_(rows, non_blocking=True)


def _pieces(entry: BatchEntry) -> Iterator[SlotRows]:
    """Yield what an entry's context gets, slot by slot."""
    at = entry.gather_from
    for gather in entry.gathers:
        row = gather.start
        while row < gather.stop:
            block, first = divmod(row, BLOCK_ROWS)
            stop = min(BLOCK_ROWS, gather.stop - block * BLOCK_ROWS)
            yield SlotRows(gather.slots[block], first, stop, at)
            at, row = at + stop - first, row + stop - first


def _angles(entry: BatchEntry, layer: int, where: slice) -> Rotation | None:
    """Return the rotation of some rows of an entry's context in one layer."""
    rotation = None if entry.gather_angles is None else entry.gather_angles.at(layer)
    if rotation is None:
        return None
    cos, sin = rotation
    within = slice(where.start - entry.gather_from, where.stop - entry.gather_from)
    return cos[within], sin[within]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of places in `slots` whose slots follow each other."""
    cuts = [at for at, (a, b) in enumerate(pairwise(slots), 1) if b != a + 1]
    yield from pairwise((0, *cuts, len(slots)))


class Gatherer:
    """Fill the device contexts of a step's entries from host slots. For the runner alone."""

    def __init__(
        self,
        host: HostRows,
        layers: int,
        ahead: int | None = None,
        *,
        windows: Sequence[int] = (),
        counters: GatherCounters | None = None,
    ) -> None:
        """`ahead`: layers to gather ahead of the computing one; None: as many as suit the device. `windows`: how many rows a query
        sees in each layer, 0 for all; none: all, everywhere."""
        self._host = host
        self._layers, self._windows = layers, windows or [0] * layers
        self._counters = counters or GatherCounters()
        self._ahead = ahead if ahead is not None else 0 if host.device.type == "cpu" else LAYERS_AHEAD
        self._device = torch.get_device_module(host.device)
        self._stream = self._device.Stream()
        self._all: Sequence[BatchEntry] = ()
        self._entries: list[BatchEntry] = []
        self._events: dict[int, list[Any]] = {}  # by job: of each layer whose copies have been queued
        self._last: Any = None  # of these, the one that was queued last

    def begin(self, entries: Sequence[BatchEntry], rope: LayerRopes | None) -> None:
        """Begin a step. The entries' contexts have been reserved."""
        self._all, self._entries = entries, [entry for entry in entries if entry.gathers]
        self._host.stalled = 0.0
        if not self._entries:
            return
        for entry in self._entries:
            self._events[entry.job] = []
            if self._host.device.type == "cuda":
                entry.gather_at_once = DeviceGather(list(_pieces(entry)), entry.gather_from)
            if rope is not None:
                positions = torch.arange(entry.gather_from, entry.start, device=self._host.device)
                entry.gather_angles = rope.cos_sin(positions)
        # Earlier work in the computing queue may still read the contexts' memory, and the angles have to be there.
        self._stream.wait_stream(self._device.current_stream(self._host.device))
        self._look_ahead(0)

    @property
    def gathering(self) -> bool:
        """Tell whether layers of this step wait for rows."""
        return bool(self._entries)

    def layer(self, layer: int) -> None:
        """Make this layer's rows available to all that is computed from now on. Entries whose rows do not come have failed."""
        for entry in self._entries:
            events = self._events[entry.job]
            while entry.failed is None and len(events) <= layer:
                self._queue(entry, len(events))
            if entry.failed is None:
                self._device.current_stream(self._host.device).wait_event(events[layer])

    def computed(self, layer: int) -> None:
        """Queue copies for the next layers, once the layer's attention has been queued."""
        if self._entries:
            self._look_ahead(layer + 1)

    def end(self) -> None:
        """End a step. No slot is being read any more, and no context written."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        self._all, self._entries = (), []
        self._events.clear()
        self._host.waited.clear()

    def _look_ahead(self, layer: int) -> None:
        """Queue copies of rows that have already come, up to `ahead` layers from `layer` on. Waits for nothing."""
        for entry in self._entries:
            events = self._events[entry.job]
            while entry.failed is None and len(events) < min(layer + self._ahead, self._layers):
                if not all(
                    self._host.ready(gather, len(events), wait=False) for _, gather in self._needed(entry, len(events))
                ):
                    break
                self._queue(entry, len(events))

    def _queue(self, entry: BatchEntry, layer: int) -> None:
        with self._device.stream(self._stream):
            try:
                self._copy(entry, layer)
            finally:  # where no memory is left, too: copies that have been queued read slots
                self._last = event = self._device.Event()
                event.record(self._stream)
        self._events[entry.job].append(event)

    def _copy(self, entry: BatchEntry, layer: int) -> None:
        needed = self._needed(entry, layer)
        read = sum(gather.stop - gather.start for _, gather in needed)
        row_bytes = 2 * self._host.row_bytes
        self._counters.count(read * row_bytes, (entry.start - entry.gather_from - read) * row_bytes)
        for start, gather in needed:
            if not self._host.ready(gather, layer, self._has_company(entry, gather)):
                entry.failed = gather.extent
                entry.late = self._host.stalls and self._host.comes(gather, layer)
                return
            if entry.gather_at_once is None:
                self._put_each(entry, layer, start, gather)
        if needed and entry.gather_at_once is not None:
            self._put_at_once(entry, entry.gather_at_once, layer, needed)

    def _put_at_once(
        self, entry: BatchEntry, pieces: DeviceGather, layer: int, needed: Sequence[tuple[int, Gather]]
    ) -> None:
        group, place = entry.context.group_of(layer), entry.context.shape.place(layer)[1]
        rotation = None if entry.gather_angles is None else entry.gather_angles.at(layer)
        if not pieces.put(self._host.arena[layer], group.data[place], rotation, needed[0][0], group.first):
            entry.gather_at_once = None
            for start, gather in needed:
                self._put_each(entry, layer, start, gather)

    def _put_each(self, entry: BatchEntry, layer: int, start: int, gather: Gather) -> None:
        at = start
        for rows in self._host.rows(gather, layer, 0):
            where = slice(at, at + len(rows))
            _put(rows, entry.context.keys(layer, where.start, where.stop), _angles(entry, layer, where))
            at += len(rows)
        at = start
        for rows in self._host.rows(gather, layer, 1):
            _put(rows, entry.context.values(layer, at, at + len(rows)))
            at += len(rows)

    def _needed(self, entry: BatchEntry, layer: int) -> list[tuple[int, Gather]]:
        """List what queries of the entry see in a layer: the first row of the context, and the rows that come there."""
        window, at, found = self._windows[layer], entry.gather_from, []
        first = max(at, entry.start + 1 - window) if window else at
        for gather in entry.gathers:
            skip = max(0, first - at)
            if skip < gather.stop - gather.start:
                found.append((at + skip, gather._replace(start=gather.start + skip)))
            at += gather.stop - gather.start
        return found

    def _has_company(self, entry: BatchEntry, gather: Gather) -> bool:
        """Tell whether another entry of the step does not need the rows of this load."""
        return gather.move is not None and any(
            other is not entry and other.failed is None and all(each.move != gather.move for each in other.gathers)
            for other in self._all
        )
