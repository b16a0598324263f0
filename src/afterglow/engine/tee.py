"""Save new rows: copy un-rotated keys, and values, from the decoder to host slots while the forward pass goes on.

Prefilled rows go out layer by layer, as soon as a layer has produced them (CachedAttention §3.2.2). Decoded rows
are single rows of many layers, too small to move one by one: they gather in a lane of a tail buffer and leave in
blocks of `FLUSH_ROWS`, and at the end of a reply. On CUDA they leave in a second queue (`row_exit`): prefilled rows straight
for their slots, decoded ones for memory that the saver copies from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from afterglow.engine.context import DeviceContext
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.row_exit import RowExit
from afterglow.kernels.no_memory import ran_out
from afterglow.kernels.rope import LayerRotations, inverse, rotate
from afterglow.kernels.stored_rows import narrowed, stored_width
from afterglow.plan.step import Run, Save
from afterglow.store.kvstore import KVStore
from afterglow.store.moving.saver import slot_runs

log = logging.getLogger("afterglow.engine")

FLUSH_ROWS = 16

Bytes = npt.NDArray[np.uint8]


def _stacked(layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Stack keys and values [rows, kv_heads, head_dim] of layers: [layers, rows, 2, kv_heads, head_dim]."""
    return torch.stack([torch.stack(of_layers) for of_layers in zip(*layers, strict=True)], 2)


def _bytes(rows: Tensor) -> Bytes:
    """View rows [..., kv_heads, stored width] on the CPU as bytes: uint8 [..., row_bytes]."""
    return rows.view(torch.uint8).flatten(-2).numpy()


@dataclass(slots=True)
class _Prefill:
    """Follow prefilled rows that leave layer by layer. `rows`: of the flattened batch. `layers`: how many have left."""

    rows: slice
    save: Save
    layers: int = 0


@dataclass(slots=True)
class _Lane:
    """Hold rows of one draft that wait in the tail buffer: `count` rows from draft row `first` on."""

    index: int
    draft: int = -1
    slots: tuple[int, ...] = ()
    first: int = 0
    count: int = 0


class Tee:
    """Hand new rows to the store. For the runner alone: `begin` and `end` around each forward pass."""

    def __init__(self, store: KVStore, shape: KVShape, arena: Tensor, max_batch: int) -> None:
        """`arena`: the store's slots, [layers, 2, slots, 64, kv_heads, stored width], locked where the device is not the CPU."""
        self._store = store
        self._dtype = kv_dtype = arena.dtype
        self._exit = None if shape.device.type == "cpu" else RowExit(shape.device)
        self._slots = arena.flatten(2, 3)  # rows of a layer's slots, one slot after another
        self._tail = torch.empty(
            (shape.layers, 2, max_batch + 1, FLUSH_ROWS, shape.kv_heads, stored_width(shape.head_dim, kv_dtype)),
            dtype=kv_dtype,
            device=shape.device,
        )
        self._free = list(range(max_batch - 1, -1, -1))
        self._spare = max_batch  # the lane of rows that are not saved
        self._lanes: dict[int, _Lane] = {}
        self._prefills: list[_Prefill] = []
        self.index: Sequence[Tensor] = ()  # on the CPU: rows of the batch, lanes, and places there, of decoded rows
        self._tail_index: Sequence[Tensor] = ()  # the same, where the rows are
        self._in_order = True  # decoded rows are the first of the batch, one after another
        self._decoded: list[tuple[Tensor, Tensor]] = [(self._tail[:0], self._tail[:0])] * shape.layers  # of this step
        self._in_lanes = 0  # layers of this step whose decoded rows are in their lanes
        self._joined: Any = None  # event: of the rows that the computing queue comes after

    def begin(self, prefills: list[tuple[slice, Save]], decodes: list[tuple[int, int, Save]]) -> None:
        """Begin a step. `prefills`: (rows of the flattened batch, save). `decodes`: (job, first row of the flattened batch, save):
        one row, and rows of guesses, FLUSH_ROWS at most."""
        self._prefills = [_Prefill(rows, save) for rows, save in prefills]
        rows: list[int] = []
        lanes: list[int] = []
        places: list[int] = []
        for job, row, save in decodes:
            lane = self._lanes.get(job)
            if lane is None:
                lane = self._lanes[job] = _Lane(self._free.pop())
            moved = lane.draft != save.draft or lane.first + lane.count != save.draft_row
            if lane.count and (moved or lane.count + save.rows > FLUSH_ROWS):
                self._flush(lane)
            if lane.count == 0:
                lane.draft, lane.first = save.draft, save.draft_row
            lane.slots = save.slots
            rows += range(row, row + save.rows)
            lanes += [lane.index] * save.rows
            places += range(lane.count, lane.count + save.rows)
            lane.count += save.rows
        self._in_order = rows == list(range(len(rows)))
        self.index = tuple(map(torch.tensor, (rows, lanes, places))) if rows else ()
        self._tail_index = ()

    def use(self, index: Sequence[Tensor], in_order: bool = False, in_lanes: int = 0) -> None:
        """Take `index` as it has come to the device, before the first layer. `in_order`: its rows are all of the batch's, in order.
        `in_lanes`: layers whose decoded rows are in their lanes already."""
        self._tail_index, self._in_order, self._in_lanes = index, in_order or self._in_order, in_lanes

    @property
    def nowhere(self) -> tuple[int, int]:
        """Return a lane and a place there for rows that are not saved."""
        return self._spare, 0

    def places(self, count: int) -> tuple[list[int], list[int]]:
        """List a lane and a place there for each of the batch's first `count` rows. All others of the step are not decoded."""
        spare, nowhere = self.nowhere
        lanes, places = [spare] * count, [nowhere] * count
        for row, lane, place in zip(*(each.tolist() for each in self.index), strict=True):
            lanes[row], places[row] = lane, place
        return lanes, places

    def next_places(self, count: int) -> tuple[list[int], list[int]]:
        """List the same for the step after this one, if the same requests decode on. Full lanes leave first."""
        self._flush_full()
        lanes, _ = self.places(count)
        next_of = {lane.index: lane.count for lane in self._lanes.values()}
        return lanes, [next_of.get(lane, 0) for lane in lanes]

    @property
    def prefilling(self) -> bool:
        """Tell whether rows of this step leave layer by layer."""
        return bool(self._prefills)

    def layers(self, rows: Tensor) -> None:
        """Save keys (un-rotated) and values [layers, tokens, 2, kv_heads, head_dim] of the flattened batch of a step that decodes
        alone."""
        if self._tail_index:
            self._to_lanes(rows, 0, self._tail_index, self._in_order and rows.shape[1] == len(self._tail_index[0]))

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Save `keys` (un-rotated) and `values` [tokens, kv_heads, head_dim] of the step's flattened batch.

        The store copies later, so neither tensor may be written to afterwards.
        """
        if self._tail_index:
            rows = self._tail_index[0]
            # A view keeps the rows of the whole batch, which are few where all of them decode.
            self._decoded[layer] = (keys, values) if len(rows) == len(keys) else (keys[rows], values[rows])
            if layer + 1 == len(self._decoded):
                picked = self._in_order or len(rows) < len(keys)
                self._to_lanes(_stacked(self._decoded[self._in_lanes :]), self._in_lanes, self._tail_index, picked)
        for each in self._prefills:
            if layer < each.layers:  # the layer left in an earlier attempt at this step
                continue
            save = each.save
            self._send(save, layer, keys[each.rows], values[each.rows])
            each.layers = layer + 1

    def _send(self, save: Save, layer: int, keys: Tensor, values: Tensor) -> None:
        """Have one layer's rows of a save [rows, kv_heads, head_dim] leave the device; those of the CPU are the saver's to copy."""
        if self._exit is None:
            k, v = (_bytes(narrowed(rows, self._dtype)) for rows in (keys, values))
            self._store.save(save.draft, layer, save.slots, save.draft_row, k, v)
        else:  # stacked: neither is a view that keeps the memory of the queries
            block = narrowed(torch.stack((keys, values)), self._dtype)
            self._copy_out(self._exit, save, layer, block[None], self._store.write_buffer)

    def _copy_out(self, out: RowExit, save: Save, first: int, block: Tensor, most: int | None = None) -> Any:
        """Copy a save's rows of layers from `first` on, [layers, 2, rows, kv_heads, stored width], to their slots, without the saver: these are
        locked. Returns an event: the copies are done. `most`: see `RowExit.copy`."""
        runs = slot_runs(save.slots, save.draft_row, save.rows)
        pairs = [
            (plane[to : to + stop - start], rows[start:stop])
            for planes, of_layer in zip(self._slots[first : first + len(block)], block, strict=True)
            for plane, rows in zip(planes, of_layer, strict=True)
            for start, stop, to in runs
        ]
        then = partial(self._store.placed, save.draft, save.draft_row, save.rows, len(block))
        return out.copy(pairs, then, most)

    def take_layers(
        self, first: int, new: Sequence[tuple[Tensor, Tensor]], index: Sequence[Tensor], into: Tensor
    ) -> None:
        """Copy keys (un-rotated) and values [rows, kv_heads, head_dim] of layers from `first` on to lanes, by an index of all rows in order,
        and to `into` [layers, 2, rows, kv_heads, stored width]."""
        into.copy_(self._to_lanes(_stacked(new), first, index, True))

    def send_layers(self, first: int, stop: int, block: Tensor) -> Any:
        """Have prefilled rows of layers [first, stop) leave the device for their slots: from `block` [layers, 2, rows, kv_heads, stored width],
        of the step's flattened batch. Returns an event: they have left; None if there are none."""
        assert self._exit is not None
        event = None
        for each in self._prefills:
            if each.layers < stop:  # otherwise these layers left in an earlier attempt at this step
                begin = max(first, each.layers)
                new = block[begin - first : stop - first, :, each.rows]
                event = self._copy_out(self._exit, each.save, begin, new)
                each.layers = stop
        return event

    def _to_lanes(self, found: Tensor, first: int, index: Sequence[Tensor], picked: bool) -> Tensor:
        """Copy keys and values of layers from `first` on [layers, rows, 2, kv_heads, head_dim] to their lanes: a few calls for a step, where
        four for each layer took 250 us to their 30 (22 layers, one row, one core). `picked`: the rows are those that decode, in the order of
        the lanes; otherwise those of the batch. Returns them as they are stored: [layers, 2, rows, kv_heads, stored width]."""
        rows, lanes, places = index
        stored = narrowed(found.flatten(0, 2), self._dtype).view(*found.shape[:4], -1).transpose(1, 2)
        self._tail[first : first + len(found), :, lanes, places] = stored if picked else stored[:, :, rows]
        return stored

    def cut(self, rows: int) -> None:
        """Cut the batch to its first `rows` rows, because the step is attempted again without the others. Zeros are saved for
        the others: the plan waits for their saves."""
        void = [each for each in self._prefills if each.rows.start >= rows]
        self._prefills = [each for each in self._prefills if each.rows.start < rows]
        for each in void:
            save, count = each.save, each.rows.stop - each.rows.start
            zeros = _bytes(torch.zeros((count, *self._tail.shape[-2:]), dtype=self._dtype))
            for layer in range(each.layers, self._tail.shape[0]):
                self._store.save(save.draft, layer, save.slots, save.draft_row, zeros, zeros)
        if self.index:
            left = self.index[0] < rows
            self.index = tuple(index[left] for index in self.index) if left.any() else ()

    def take_back(self, job: int, rows: int) -> None:
        """Forget the last `rows` rows of the step's rows of a decoding job: they are of guesses that were wrong, and are never
        saved."""
        lane = self._lanes.get(job)
        if lane is not None:
            lane.count -= rows

    def join(self) -> None:
        """Before tokens are drawn: have them come after the rows that leave, so that one wait of the host is for both."""
        if self._exit is not None:
            self._joined = self._exit.join()

    def end(self) -> None:
        """End a step: the rows that left before its tokens are handed to the store, and full lanes leave."""
        self._prefills = []
        if self._exit is not None:
            self._exit.hand_over(self._joined)
        self._joined = None
        self._flush_full()

    def hand_over(self) -> None:
        """Hand over all rows that leave, where no step follows."""
        if self._exit is not None:
            self._exit.hand_over(self._exit.last)

    def release(self, job: int) -> None:
        """Note that a job has left the device: the rows in its lane leave now."""
        lane = self._lanes.pop(job, None)
        if lane is not None:
            self._flush(lane)
            self._free.append(lane.index)

    def context(self, context: DeviceContext, save: Save, rotation: Callable[[Tensor], LayerRotations | None]) -> None:
        """Save rows of a context that is about to be given up, or none where the device has no memory for copies: its keys are turned
        back, by one rounding more. `rotation`: of positions."""
        layers = self._tail.shape[0]
        for layer in range(layers):
            try:
                self._send(save, layer, *_turned_back(context, layer, save, rotation))
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                log.warning("%d rows over a selection are not kept: %s", save.rows, error)
                self._store.lose(save.draft, save.draft_row, save.rows, layers - layer)
                return

    def _flush_full(self) -> None:
        for lane in self._lanes.values():
            if lane.count == FLUSH_ROWS:
                self._flush(lane)

    def _flush(self, lane: _Lane) -> None:
        """Have the rows of a lane leave, also where the device has no memory left: no step is repeated for them."""
        if lane.count == 0:
            return
        rows = self._tail[:, :, lane.index, : lane.count]
        draft, slots, first = lane.draft, lane.slots, lane.first

        def save(block: Tensor) -> None:
            self._store.save_block(draft, slots, first, _bytes(block))

        try:
            block = _copied(rows)  # the lane is filled again before the copy is done
            if self._exit is None:
                save(block)
            else:
                self._exit.stage(save, block)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            log.warning("rows leave the device one layer after the other, and are waited for: %s", error)
            save(_fetched(rows))
        lane.count = 0


def _turned_back(
    context: DeviceContext, layer: int, save: Save, rotation: Callable[[Tensor], LayerRotations | None]
) -> tuple[Tensor, Tensor]:
    """Copy the rows of a save, with keys as they were before they were rotated."""
    keys, values = context.read(layer, save.job_row, save.job_row + save.rows)
    rotations = rotation(torch.arange(save.job_row, save.job_row + save.rows, device=keys.device))
    turned = rotations.at(layer) if rotations is not None else None
    return keys.clone() if turned is None else rotate(keys, inverse(turned)), values.clone()


def _copied(rows: Tensor) -> Tensor:
    """Copy rows on their device."""
    return rows.clone()


def _fetched(rows: Tensor) -> Tensor:
    """Copy rows [layers, 2, rows, kv_heads, width] to the CPU without memory of the device: each run of memory by itself."""
    found = torch.empty(rows.shape, dtype=rows.dtype)
    for here, there in zip(found.flatten(0, 1), rows.flatten(0, 1), strict=True):
        here.copy_(there)
    return found


def saves_of(runs: Sequence[Run]) -> tuple[list[tuple[slice, Save]], list[tuple[int, int, Save]]]:
    """Divide the step's saves for the tee: runs of prefilled rows, and decoded rows."""
    prefills, decodes = [], []
    at = 0
    for run in runs:
        for save in run.saves:
            first = at + save.job_row - run.start
            if run.own == 1 and run.admit is None and run.sample:
                decodes.append((run.job, first, save))
            else:
                prefills.append((slice(first, first + save.rows), save))
        at += len(run.tokens)
    return prefills, decodes
