"""Rows of the next request on the device before its turn: the read buffer of CachedAttention §3.2.1, figure 6c.

    a step computes             the first layers of what `Step.ahead` names come from host slots, behind the step's own gathers
    the job is admitted         these layers are copied from the buffer to its context; those behind them come from host slots

All copies, to the buffer and out of it, are in the gatherer's queue, in this order: no layer waits for anything but its own copy.
The plan keeps the slots for as long as steps name them. So copies are waited for only where a step neither names them any more nor
gathers these rows.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from afterglow.engine.kv_shape import KVShape
from afterglow.engine.slot_pieces import slot_pieces
from afterglow.engine.stats import GatherCounters
from afterglow.engine.transfers import wait
from afterglow.kernels.context_pages import PAGE_ROWS, Pages, Slab
from afterglow.kernels.no_memory import ran_out
from afterglow.kernels.rope import LayerRopes
from afterglow.kernels.slot_gather import SlotGather
from afterglow.plan.step import Gather, RowsAhead, Step

log = logging.getLogger("afterglow.engine")


class DeviceReadBuffer:
    """Hold the first layers of what one request is going to gather. For the gatherer alone, which queues its copies in `stream` too."""

    def __init__(self, arena: Tensor, shape: KVShape, num_bytes: int, counters: GatherCounters) -> None:
        """`arena`: the host's slots, [layers, 2, slots, 64, kv_heads, stored width]. `num_bytes`: what the buffer takes."""
        self._arena, self._shape, self._counters = arena, shape, counters
        self._device = torch.get_device_module(shape.device)
        self.stream = self._device.Stream()
        with self._device.stream(self.stream):  # which is then the only one that the memory is waited for by
            self._memory = torch.empty(num_bytes // shape.dtype.itemsize, dtype=shape.dtype, device=shape.device)
        self._rows = self._memory[:0]  # [layers, 2, kv_heads, rows, head_dim]: of `_held`, in whole pages
        self._held: RowsAhead | None = None
        self._layers = 0  # of these, those that were copied
        self._copied: Any = None  # event: the slots of what it holds are not read any more
        self._left: Any = None  # the same of what it held before, until that is waited for

    def hold(self, ahead: RowsAhead, rope: LayerRopes | None) -> None:
        """Queue copies of what is to be read ahead, unless that is there already; nothing waits for them."""
        if ahead == self._held:
            return
        self._let_go()
        pages = self._pages(ahead)
        gather = SlotGather(list(slot_pieces(ahead.gathers, 0)), 0)
        self._held, self._layers = ahead, 0
        with self._device.stream(self.stream):
            try:
                angles = None
                if rope is not None:
                    positions = torch.arange(ahead.first, ahead.first + ahead.rows, device=self._shape.device)
                    angles = rope.cos_sin(positions)
                for layer in range(ahead.layers):
                    rotation = None if angles is None else angles.at(layer)
                    gather.put(self._arena[layer], pages, layer, rotation, 0)
                    self._layers += 1
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                log.warning("the device has no memory to read the next request's rows ahead: %s", error)
            finally:
                self._copied = self._device.Event()
                self._copied.record(self.stream)
        self._counters.ahead_read += self._layers * ahead.rows * self._row_bytes

    def keep(self, step: Step) -> None:
        """Begin a step, whose moves may write to all slots that it neither names nor gathers from."""
        held = self._held
        if held is not None and held != step.ahead:
            gathering = (run for run in step.runs if run.gathers)
            if not any(held.ends_with(run.start - _rows(run.gathers), run.gathers) for run in gathering):
                self._let_go()
        if self._left is not None:  # which the step before has mostly copied from
            wait(self._left)
            self._left = None

    def _let_go(self) -> None:
        """Forget what it holds. Its slots are read until the next step begins."""
        if self._held is not None:
            self._left, self._held = self._copied, None

    def layers_of(self, first: int, gathers: tuple[Gather, ...]) -> int:
        """Return how many of the first layers it has of what is gathered from row `first` of a context on."""
        return self._layers if self._held is not None and self._held.ends_with(first, gathers) else 0

    def put(self, layer: int, pages: Pages, number: int, first: int, stop: int) -> None:
        """Queue a copy of rows [first, stop) of the context, in one layer, to its pages, where the layer is the `number`-th."""
        assert self._held is not None
        at = first - self._held.first
        pages.fill(number, first, self._rows[layer][:, :, at : at + stop - first])
        self._counters.ahead_used += (stop - first) * self._row_bytes

    def _pages(self, ahead: RowsAhead) -> Pages:
        """Divide the memory for so many rows and layers."""
        count = -(-ahead.rows // PAGE_ROWS)
        size = ahead.layers, 2, self._shape.kv_heads, count * PAGE_ROWS, self._shape.head_dim
        self._rows = self._memory[: math.prod(size)].view(size)
        pages = Pages()
        for page in Slab(self._rows).take(count):
            pages.append(page)
        return pages

    @property
    def _row_bytes(self) -> int:
        """Count the bytes of a row in one layer, as it is stored."""
        return 2 * self._arena[0, 0, 0, 0].nbytes


def _rows(gathers: tuple[Gather, ...]) -> int:
    return sum(gather.stop - gather.start for gather in gathers)
