"""Hold KV on the device: one contiguous, growing segment per context, rotated and ready to attend.

Layout [layers, 2, kv_heads, capacity, head_dim]: head-major, because a decode step then reads each head's rows as
one run of memory (1.3-1.5 times faster than row-major on CPU from 1,024 rows on; `docs/log.md`). Layers with a sliding window
may have a second, shorter segment for the last rows alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.memory.pages import LARGE
from afterglow.memory.pool import Pool
from afterglow.plan.options import Held


@dataclass(frozen=True, slots=True)
class KVShape:
    """Describe one row of a context. `windowed`: layers that hold the last rows alone, as many as `held` says."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windowed: tuple[int, ...] = ()
    held: Held = Held()

    @property
    def row_bytes(self) -> int:
        """Count the bytes of one row, all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def place(self, layer: int) -> tuple[bool, int]:
        """Return whether a layer holds the last rows alone, and its number among the layers that do as it does."""
        return _places(self.layers, self.windowed)[layer] if self.windowed else (False, layer)


@functools.cache
def _places(layers: int, windowed: tuple[int, ...]) -> list[tuple[bool, int]]:
    kinds = [layer in windowed for layer in range(layers)]
    return [(kind, kinds[:layer].count(kind)) for layer, kind in enumerate(kinds)]


class LayerGroup(NamedTuple):
    """Rows from `first` on of some layers of a context: [layers, 2, kv_heads, capacity, head_dim]."""

    data: Tensor
    first: int


class DeviceContext:
    """Hold the rotated keys and the values of one context; `rows` of `capacity` are valid.

    Layers with a window hold rows [first, rows) in `recent`, if the shape says so; all other layers hold all rows in `data`.
    """

    __slots__ = ("_pool", "capacity", "data", "first", "recent", "rows", "shape")

    def __init__(self, shape: KVShape, capacity: int, pool: Pool | None = None) -> None:
        """`pool`: lends the memory of large contexts on CPU."""
        self._pool = pool
        self.shape = shape
        self.capacity = capacity
        self.rows = self.first = 0
        windowed = len(shape.windowed)
        self.data: Tensor = self._empty(shape.layers - windowed, capacity)
        self.recent: Tensor | None = self._empty(windowed, min(capacity, shape.held.most)) if windowed else None

    def _empty(self, layers: int, capacity: int) -> Tensor:
        s = self.shape
        sizes = (layers, 2, s.kv_heads, capacity, s.head_dim)
        num_bytes = math.prod(sizes) * s.dtype.itemsize
        if self._pool is None or s.device.type != "cpu" or num_bytes < LARGE:
            return torch.empty(sizes, dtype=s.dtype, device=s.device)
        return torch.from_numpy(self._pool.take(num_bytes, again=True)).view(s.dtype).view(sizes)

    @property
    def num_bytes(self) -> int:
        """Count the bytes that the context holds."""
        return self.data.nbytes + (self.recent.nbytes if self.recent is not None else 0)

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` rows, and keep the valid ones."""
        if capacity <= self.capacity:
            return
        data = self._empty(len(self.data), capacity)
        data[:, :, :, : self.rows] = self.data[:, :, :, : self.rows]
        self.data, self.capacity = data, capacity
        room = min(capacity, self.shape.held.most)
        if self.recent is not None and room > self.recent.shape[3]:
            recent, kept = self._empty(len(self.recent), room), max(0, self.rows - self.first)
            recent[:, :, :, :kept] = self.recent[:, :, :, :kept]
            self.recent = recent

    def make_room(self, stop: int) -> None:
        """Let layers with a window give up old rows, so that rows up to `stop` fit."""
        first = self.shape.held.first(stop)
        if self.recent is None or first <= self.first:
            return
        shift, kept = first - self.first, max(0, self.rows - first)
        for at in range(0, kept, shift):  # in pieces that do not overlap the place where they go
            to = min(kept, at + shift)
            self.recent[:, :, :, at:to] = self.recent[:, :, :, at + shift : to + shift]
        self.first = first

    def copy_rows(self, source: DeviceContext, rows: int) -> None:
        """Copy the first `rows` rows from another context, as far as it holds them. They are rotated to the same positions."""
        self.data[:, :, :, :rows] = source.data[:, :, :, :rows]
        self.rows, self.first = rows, source.first
        if self.recent is not None and source.recent is not None:
            held = max(0, rows - self.first)
            self.recent[:, :, :, :held] = source.recent[:, :, :, :held]

    def group_of(self, layer: int) -> LayerGroup:
        """Return what a layer's rows are a part of; its number there is `KVShape.place`'s."""
        recent = self.shape.place(layer)[0]
        return LayerGroup(self.recent, self.first) if recent and self.recent is not None else LayerGroup(self.data, 0)

    def keys(self, layer: int, start: int, stop: int) -> Tensor:
        """Return a view [stop - start, kv_heads, head_dim] of some rows in one layer; those beyond `rows` are undefined."""
        return self._rows(layer, 0, start, stop)

    def values(self, layer: int, start: int, stop: int) -> Tensor:
        """Return a view [stop - start, kv_heads, head_dim] of some rows in one layer; those beyond `rows` are undefined."""
        return self._rows(layer, 1, start, stop)

    def _rows(self, layer: int, which: int, start: int, stop: int) -> Tensor:
        data, first = self.group_of(layer)
        assert first <= start <= stop <= first + data.shape[3], f"rows {start} to {stop} are not held in layer {layer}"
        return data[self.shape.place(layer)[1], which, :, start - first : stop - first].transpose(0, 1)
