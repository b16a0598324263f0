"""Attention of steps with few rows on CUDA: all reads in two launches for a layer, whatever the batch.

A kernel of Triton's does it (`triton_attention`), behind its gate. Prefills of many rows are left to torch: its flash operators are made for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afterglow.kernels.gate import Gate
from afterglow.kernels.paged_parts import PagedPart, PartTables, suited

MOST_SHARED = 128  # queries that read rows together

_gate = Gate("triton_attention")


def possible(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, cap: float) -> bool:
    """Return whether the kernel can be used for contexts of such heads and scores capped by `cap`."""
    if device.type != "cuda" or not suited(dtype, head_dim, heads // kv_heads):
        return False
    return _gate.passes(device, dtype, head_dim, heads, kv_heads, cap)


class DeviceReads:
    """Some parts that queries of a step read, in contexts of one shape and device."""

    def __init__(self, parts: Sequence[PagedPart] | PartTables, cap: float) -> None:
        """Take tables, or at least one part, none empty; then tables are made at the first layer."""
        self._parts, self._cap = parts, cap
        self._tables = parts if isinstance(parts, PartTables) else None
        self._data = parts.base if isinstance(parts, PartTables) else parts[0].data

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor, lse: Tensor) -> bool:
        """Do what `kernels.decode.Reads.attend` does, and return True; or nothing, and return False: torch must do it."""
        data = self._data
        _, heads, head_dim = q.shape
        kv_heads = data.shape[2]
        if q.dtype != data.dtype or not possible(data.device, q.dtype, head_dim, heads, kv_heads, self._cap):
            return False
        if self._tables is None:
            assert not isinstance(self._parts, PartTables)
            self._tables = PartTables.of(self._parts, heads // kv_heads)
        tables = self._tables
        kind = data.device, q.dtype, head_dim, heads, kv_heads, self._cap
        done = _gate.run(
            lambda kernels: kernels.attend_parts(tables, layer, q, scale, self._cap, out, lse) or True, *kind
        )
        return done is not None
