"""Hold KV on the device: one contiguous, growing segment per context, rotated and ready to attend.

Layout [layers, 2, kv_heads, capacity, head_dim]: head-major, because a decode step then reads each head's rows as
one run of memory (1.3-1.5 times faster than row-major on CPU from 1,024 rows on; `docs/log.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.memory.pages import LARGE
from afterglow.memory.pool import Pool


@dataclass(frozen=True, slots=True)
class KVShape:
    """Describe one row of a context."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Count the bytes of one row, all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class DeviceContext:
    """Hold the rotated keys and the values of one context; `rows` of `capacity` are valid."""

    __slots__ = ("_pool", "capacity", "data", "rows", "shape")

    def __init__(self, shape: KVShape, capacity: int, pool: Pool | None = None) -> None:
        """`pool`: lends the memory of large contexts on CPU."""
        self._pool = pool
        self.shape = shape
        self.capacity = capacity
        self.rows = 0
        self.data: Tensor = self._empty(capacity)

    def _empty(self, capacity: int) -> Tensor:
        s = self.shape
        sizes = (s.layers, 2, s.kv_heads, capacity, s.head_dim)
        num_bytes = math.prod(sizes) * s.dtype.itemsize
        if self._pool is None or s.device.type != "cpu" or num_bytes < LARGE:
            return torch.empty(sizes, dtype=s.dtype, device=s.device)
        return torch.from_numpy(self._pool.take(num_bytes, again=True)).view(s.dtype).view(sizes)

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` rows, and keep the valid ones."""
        if capacity <= self.capacity:
            return
        data = self._empty(capacity)
        data[:, :, :, : self.rows] = self.data[:, :, :, : self.rows]
        self.data, self.capacity = data, capacity

    def copy_rows(self, source: DeviceContext, rows: int) -> None:
        """Copy the first `rows` rows from another context. They are rotated to the same positions."""
        self.data[:, :, :, :rows] = source.data[:, :, :, :rows]
        self.rows = rows

    def keys(self, layer: int) -> Tensor:
        """Return a view [capacity, kv_heads, head_dim] for one layer; rows beyond `rows` are undefined."""
        return self.data[layer, 0].transpose(0, 1)

    def values(self, layer: int) -> Tensor:
        """Return a view [capacity, kv_heads, head_dim] for one layer; rows beyond `rows` are undefined."""
        return self.data[layer, 1].transpose(0, 1)
