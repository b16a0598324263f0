"""Copy cached rows from host slots to the device, layer by layer: CachedAttention §3.2.1, layer-wise pre-loading.

Each row is copied once, and its key is rotated in the same pass. On a device with its own queues of work the copies run in
a second one, ahead of the layer that is being computed, as far as the rows have come; each layer has an event, and the
computing queue waits for just that, or for those of a graph (`engine.prefill_pass`). On a CPU both are the calling thread, and a
layer is gathered when it is its turn. A layer's rows are one call (`kernels.slot_gather`). A request's first layers may be on the device before its turn (`engine.read_buffer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from afterglow.engine.context import DeviceContext
from afterglow.engine.read_buffer import DeviceReadBuffer
from afterglow.engine.slot_pieces import slot_pieces
from afterglow.engine.stats import GatherCounters
from afterglow.engine.transfers import wait
from afterglow.kernels.rope import LayerRopes, LayerRotations
from afterglow.kernels.slot_gather import SlotGather
from afterglow.plan.step import ExtentId, Gather, RowsAhead, Step
from afterglow.store.kvstore import KVStore

LAYERS_AHEAD = 2  # of the layer being computed, on a device with work queues
STALL_SECONDS = 0.25  # how long other requests wait, in a step, for rows that they do not need
POLL_SECONDS = 0.05  # between two looks whether a caller waits


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
    slot_gather: SlotGather | None = None
    buffered: int = 0  # first layers whose gathered rows are in the read buffer
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
        buffer: DeviceReadBuffer | None = None,
    ) -> None:
        """`ahead`: layers to gather ahead of the computing one; None: as many as suit the device. `windows`: how many rows a query
        sees in each layer, 0 for all; none: all, everywhere. `buffer`: for rows that are read ahead."""
        self._host = host
        self._layers, self._windows = layers, windows or [0] * layers
        self._counters = counters or GatherCounters()
        self._ahead = ahead if ahead is not None else 0 if host.device.type == "cpu" else LAYERS_AHEAD
        self._device = torch.get_device_module(host.device)
        self._buffer = buffer
        self._stream = buffer.stream if buffer is not None else self._device.Stream()
        self._all: Sequence[BatchEntry] = ()
        self._entries: list[BatchEntry] = []
        self._events: dict[int, list[Any]] = {}  # by job: of each layer whose copies have been queued
        self._last: Any = None  # of these, the one that was queued last

    def keep(self, step: Step) -> None:
        """Before a step's moves: wait for copies that read slots which it gives away."""
        if self._buffer is not None:
            self._buffer.keep(step)

    def begin(self, entries: Sequence[BatchEntry], rope: LayerRopes | None) -> None:
        """Begin a step. The entries' contexts have pages."""
        self._all, self._entries = entries, [entry for entry in entries if entry.gathers]
        self._host.stalled = 0.0
        if not self._entries:
            return
        for entry in self._entries:
            self._events[entry.job] = []
            entry.slot_gather = SlotGather(list(slot_pieces(entry.gathers, entry.gather_from)), entry.gather_from)
            if self._buffer is not None:
                entry.buffered = self._buffer.layers_of(entry.gather_from, entry.gathers)
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

    def read_ahead(self, ahead: RowsAhead | None, rope: LayerRopes | None) -> None:
        """Queue copies of what another request is going to gather, behind the step's own. Nothing waits for them."""
        if self._buffer is not None and ahead is not None:
            self._buffer.hold(ahead, rope)

    def end(self) -> None:
        """End a step. Slots are not read any more but for rows that are read ahead, and no context is written."""
        if self._last is not None:
            wait(self._last)
            self._last = None
        self._all, self._entries = (), []
        self._events.clear()
        self._host.waited.clear()

    def _look_ahead(self, layer: int) -> None:
        """Queue copies of rows that have already come, up to `ahead` layers from `layer` on. Waits for nothing."""
        for entry in self._entries:
            events = self._events[entry.job]
            last = min(max(layer, entry.buffered) + self._ahead, self._layers)
            while entry.failed is None and len(events) < last:
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
        for _, gather in needed:
            if not self._host.ready(gather, layer, self._has_company(entry, gather)):
                entry.failed = gather.extent
                entry.late = self._host.stalls and self._host.comes(gather, layer)
                return
        if not needed:
            return
        number = entry.context.shape.place(layer)[1]
        if layer < entry.buffered and self._buffer is not None:
            self._buffer.put(layer, entry.context.pages(layer), number, entry.gather_from, entry.start)
        else:
            assert entry.slot_gather is not None
            rotation = None if entry.gather_angles is None else entry.gather_angles.at(layer)
            entry.slot_gather.put(self._host.arena[layer], entry.context.pages(layer), number, rotation, needed[0][0])

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
