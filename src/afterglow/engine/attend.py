"""Attention over cached context: what the engine passes to the decoder as its `Attend`.

For each layer, in this order: project, tee the new un-rotated rows to the saver, rotate, bring in the layer's
cached rows (waiting for that layer only: CachedAttention §3.2.1, layer-wise pre-loading), attend.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.engine.context import DeviceContext
from afterglow.engine.tee import Tee
from afterglow.kernels.attention import attend
from afterglow.kernels.rope import RopeTable, Rotation, rotate_into
from afterglow.model.decoder import Attention
from afterglow.plan.step import ExtentId, Gather
from afterglow.store.kvstore import KVStore


@dataclass(slots=True)
class Part:
    """One run of the step: rows `where` of the flattened batch are rows [start, stop) of `context`."""

    job: int
    where: slice
    start: int
    stop: int
    context: DeviceContext
    gathers: tuple[Gather, ...] = ()
    gather_from: int = 0  # first row of the context that the gathers fill
    gather_angles: Rotation | None = None
    failed: ExtentId | None = None
    own_from: int = 0  # rows before are read together with others (see `engine.relay`)


@dataclass(slots=True)
class HostRows:
    """Reads rows out of the host arena: [layers, 2, slots, 64, kv_heads, head_dim], un-rotated."""

    arena: Tensor
    store: KVStore
    read_timeout: float
    device: torch.device
    waited: dict[int, int] = field(default_factory=dict)  # move -> layers known to be there

    def ready(self, gather: Gather, layer: int) -> bool:
        """Wait until `layer` of the gather's extent is in its slots; False: it failed or is too late."""
        if gather.move is None or self.waited.get(gather.move, -1) >= layer:
            return True
        if not self.store.wait_layer(gather.move, layer, self.read_timeout):
            return False
        self.waited[gather.move] = layer
        return True

    def rows(self, gather: Gather, layer: int, which: int) -> Tensor:
        """[rows, kv_heads, head_dim] of keys (`which` 0) or values (1); a view where the slots are consecutive."""
        first, last = gather.start // BLOCK_ROWS, -(-gather.stop // BLOCK_ROWS)
        slots = gather.slots[first:last]
        plane = self.arena[layer, which]
        if slots[-1] - slots[0] == len(slots) - 1 and list(slots) == list(range(slots[0], slots[-1] + 1)):
            blocks = plane[slots[0] : slots[-1] + 1]
        else:
            blocks = plane.index_select(0, torch.tensor(slots))
        rows = blocks.reshape(-1, *blocks.shape[2:])
        return rows[gather.start - first * BLOCK_ROWS : gather.stop - first * BLOCK_ROWS]


class CachedAttend:
    """`Attend` for one step: exact attention of each part over its whole context."""

    def __init__(
        self, parts: list[Part], angles: Rotation | None, rope: RopeTable | None, host: HostRows, tee: Tee
    ) -> None:
        self.parts = parts
        self._angles = angles
        self._host = host
        self._tee = tee
        for part in parts:
            if part.gathers and rope is not None:
                positions = torch.arange(part.gather_from, part.start, device=part.context.shape.device)
                part.gather_angles = rope.cos_sin(positions)

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        self._tee.layer(layer, k, v)
        if self._angles is not None:
            q, k = attention.rotate(q, self._angles), attention.rotate(k, self._angles)
        for part in self.parts:
            if part.gathers and part.failed is None:
                self._gather(layer, part)
            if part.failed is None:
                part.context.keys(layer)[part.start : part.stop] = k[part.where]
                part.context.values(layer)[part.start : part.stop] = v[part.where]
        return self._attention(layer, attention, q).flatten(1)

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        """All rows of the step over their contexts, which are on the device: [rows, heads, head_dim]."""
        out = torch.empty_like(q)
        for part in self.parts:
            if part.failed is not None:
                out[part.where] = 0  # void, but it must not become NaN: the forward goes on for the others
                continue
            keys, values = part.context.keys(layer), part.context.values(layer)
            out[part.where] = self._attended(
                part, q[part.where], keys[: part.stop], values[: part.stop], attention.scale
            )
        return out

    def _attended(self, part: Part, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """One part's new rows over its whole context, in one layer."""
        return attend(q, keys, values, scale=scale, causal=True)[0]

    def _gather(self, layer: int, part: Part) -> None:
        """Copy (and rotate, in the same pass) one layer's cached rows from host slots to the device segment."""
        keys, values = part.context.keys(layer), part.context.values(layer)
        at = part.gather_from
        for gather in part.gathers:
            if not self._host.ready(gather, layer):
                part.failed = gather.extent
                return
            n = gather.stop - gather.start
            k = self._host.rows(gather, layer, 0).to(keys.device, non_blocking=True)
            if part.gather_angles is None:
                keys[at : at + n] = k
            else:
                cos, sin = part.gather_angles
                begin = at - part.gather_from
                rotate_into(k, (cos[begin : begin + n], sin[begin : begin + n]), keys[at : at + n])
            values[at : at + n] = self._host.rows(gather, layer, 1).to(values.device, non_blocking=True)
            at += n
