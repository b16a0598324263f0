"""One matrix and how it is kept: the only place that knows about packed weights.

On CPU, float32 weights are reordered once into oneDNN's own layout, and the original is dropped: one copy.
Measured on one core (AMD Zen 4, AVX-512, torch 2.13) against `F.linear` and `x @ W.T.contiguous()`, 768 x
4096: 8 rows 0.79 ms to 1.55 and 1.79 ms, 64 rows 3.7 to 5.1 and 5.2 ms, 1024 rows 57 to 65 and 65 ms. One
packing serves all row counts, unless packed for a single row. The operators are private: where a trial run
fails or differs, `F.linear` does the work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 64  # row count that the packed layout is chosen for; anything but 1 is good for all
FEW_ROWS = 4  # oneDNN is slower at 1 and 2 rows than at 4


class Linear:
    """`x` [rows, inputs] -> [rows, outputs]."""

    __slots__ = ("_packed", "_weight", "bias", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        """`weight` [outputs, inputs], `bias` [outputs] of the same dtype, both where the work will be done.

        `pack` keeps the weight in the packed layout only; where `can_pack` is True.
        """
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = None
        if pack:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] in the weight's dtype."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        rows = x.shape[0]
        if rows >= FEW_ROWS or rows == 0:
            return _packed_linear(x, self._packed, self.bias)
        return _packed_linear(
            x.expand(FEW_ROWS, -1) if rows == 1 else F.pad(x, (0, 0, 0, FEW_ROWS - rows)),
            self._packed,
            self.bias,
        )[:rows]

    def rows(self, start: int, stop: int) -> Linear:
        """The outputs from `start` to `stop` alone, as a matrix of its own: where this one is packed, a copy."""
        bias = None if self.bias is None else self.bias[start:stop]
        if self._packed is None:
            assert self._weight is not None
            return Linear(self._weight[start:stop], bias)
        return Linear(self._packed.to_dense()[start:stop].contiguous(), bias, pack=True)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed weights work here: tries a small product and compares."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    try:
        weight = torch.arange(48, dtype=dtype).reshape(6, 8) / 48
        x = torch.arange(40, dtype=dtype).reshape(5, 8) / 40
        bias = torch.arange(6, dtype=dtype)
        packed = Linear(weight, bias, pack=True)
        return all(torch.allclose(packed(x[:rows]), F.linear(x[:rows], weight, bias), atol=1e-5) for rows in (1, 5))
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False  # an operator that is missing or has another signature in this torch
