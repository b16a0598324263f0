"""KV on the device: one contiguous, growing segment per context, rotated and ready to attend.

Layout [layers, 2, kv_heads, capacity, head_dim]: head-major, because a decode step then reads each head's rows as
one run of memory (1.3-1.5 times faster than row-major on CPU from 1,024 rows on; `docs/log.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.kernels.memory import empty


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one row of context is made of."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class DeviceContext:
    """The rotated keys and the values of one context; `rows` of `capacity` are valid."""

    __slots__ = ("capacity", "data", "rows", "shape")

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.rows = 0
        self.data: Tensor = self._empty(capacity)

    def _empty(self, capacity: int) -> Tensor:
        s = self.shape
        return empty((s.layers, 2, s.kv_heads, capacity, s.head_dim), s.dtype, s.device, again=True)

    def reserve(self, capacity: int) -> None:
        """Hold at least `capacity` rows from now on, keeping those that are valid."""
        if capacity <= self.capacity:
            return
        data = self._empty(capacity)
        data[:, :, :, : self.rows] = self.data[:, :, :, : self.rows]
        self.data, self.capacity = data, capacity

    def copy_rows(self, source: DeviceContext, rows: int) -> None:
        """Take the first `rows` rows from another context (they are rotated to the same positions)."""
        self.data[:, :, :, :rows] = source.data[:, :, :, :rows]
        self.rows = rows

    def keys(self, layer: int) -> Tensor:
        """[capacity, kv_heads, head_dim] view for one layer, rows beyond `rows` undefined."""
        return self.data[layer, 0].transpose(0, 1)

    def values(self, layer: int) -> Tensor:
        """[capacity, kv_heads, head_dim] view for one layer, rows beyond `rows` undefined."""
        return self.data[layer, 1].transpose(0, 1)
