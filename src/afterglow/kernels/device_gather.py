"""Rows that come from host memory to a context on CUDA: read from their slots and rotated, in one launch for a layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.kernels.gate import Gate
from afterglow.kernels.paged_parts import suited
from afterglow.kernels.rope import Rotation

STORED = (torch.int8, torch.float16, torch.bfloat16, torch.float32)

_gate = Gate("triton_gather")


class SlotRows(NamedTuple):
    """Rows [first, stop) of a slot's 64, which go to rows from `at` on of a context."""

    slot: int
    first: int
    stop: int
    at: int


class DeviceGather:
    """Which rows one context gets in a step. The table is made at the first layer."""

    def __init__(self, pieces: Sequence[SlotRows], angles_from: int) -> None:
        """`angles_from`: the row of the context that the rotations begin with."""
        self._pieces, self._angles_from = pieces, angles_from
        self._table: Tensor | None = None

    def put(self, stored: Tensor, to: Tensor, rotation: Rotation | None, least: int, held_from: int) -> bool:
        """Put keys, rotated, and values of the rows from `least` on into the context, and return True; or do nothing and return
        False: torch must do it.

        `stored` [2, slots, 64, kv_heads, stored width]: a layer of the host's slots, in memory that is locked for the device. `to`
        [2, kv_heads, capacity, head_dim]: the layer of the context, whose first row there is `held_from`.
        """
        kv_heads, _, head_dim = to.shape[1:]
        if stored.dtype not in STORED or not suited(to.dtype, head_dim, 1):
            return False
        if not stored[0, 0].is_contiguous() or to.stride()[2:] != (head_dim, 1):
            return False
        rotary = 0 if rotation is None else rotation[0].shape[1]

        def launch(kernels: ModuleType) -> bool:
            if self._table is None:
                self._table = torch.tensor(self._pieces, dtype=torch.int64).to(to.device, non_blocking=True)
            kernels.gather(stored, to, self._table, rotation, least, held_from, self._angles_from)
            return True

        kind = to.device, to.dtype, stored.dtype, head_dim, kv_heads, rotary
        return _gate.run(launch, *kind) is not None
