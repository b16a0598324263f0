"""The shape of a model's KV on the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

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
