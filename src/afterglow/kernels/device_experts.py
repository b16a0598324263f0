"""A mixture of experts on CUDA for few rows, by kernels of Triton's behind their gate: each row's experts are read where they are chosen.

Rows of one expert as one product need to know, on the host, which rows these are: that waits for the device, and launches other work
each time. Here a program reads the number of its expert on the device, and from it where the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afterglow.kernels.gate import Gate

MOST_ROWS = 128  # for more, one product for each expert reads less

_gate = Gate("triton_experts")


class ExpertTables:
    """Where the weights of a layer's experts are: in elements from the beginning of the first one's, int64 [experts] on the device. `wide`
    [2 * inner, hidden] have gates and, behind them, values, `narrow` is [hidden, inner]."""

    __slots__ = ("base", "hidden", "inner", "narrow", "wide")

    def __init__(self, wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> None:
        """Take contiguous weights of one dtype on one device, which have to outlive the tables."""
        self.base = wide[0]
        self.inner, self.hidden = wide[0].shape[0] // 2, wide[0].shape[1]
        first, size = self.base.data_ptr(), self.base.element_size()
        places = [[(each.data_ptr() - first) // size for each in matrices] for matrices in (wide, narrow)]
        self.wide, self.narrow = torch.tensor(places, dtype=torch.int64).to(self.base.device)


def usable_rows(tables: ExpertTables) -> int:
    """Return how many rows the kernels may be used for, 0 for none. May wait for the device."""
    return MOST_ROWS if _gate.passes(tables.base.device, tables.base.dtype) else 0


def chosen_experts(x: Tensor, weights: Tensor, chosen: Tensor, tables: ExpertTables) -> Tensor | None:
    """Compute [rows, hidden] from `x` of the same shape: the sum of what the experts `chosen`, int64 [rows, experts of a row], make of a row,
    times `weights` of that shape and the dtype of `x`. None: torch must do it."""
    if len(x) > MOST_ROWS or x.stride(1) != 1:
        return None
    return _gate.run(lambda kernels: kernels.chosen_experts(x, weights, chosen, tables), x.device, x.dtype)
