"""One matrix and the way it is kept: the only place that knows about packed and quantised weights.

Plain, or (float32 on CPU) reordered once into panels of our own or into oneDNN's layout, and the original dropped: whichever a
short trial finds faster for a matrix of that size. Measured on one core (AMD with AVX-512, torch 2.13), 4,096 x 768, panels,
oneDNN's and plain: 1 row 0.34, 0.41 and 0.80 ms, 8 rows 0.35, 0.52 and 1.36, 64 rows 1.9, 2.0 and 5.8, 256 rows 7.4, 7.5 and
20. oneDNN's packing serves all row counts, unless packed for a single row.

Or int8, on request: 8 bits for each weight, with a scale for each output, and 8 bits for each number of the rows, with a scale
for each row; in panels of our own (AVX-512 VNNI) or by oneDNN: 0.08 and 0.13 ms, 0.10 and 0.19, 0.50 and 0.60, 1.9 and 2.0.
Torch's own dynamic quantisation takes one scale for all rows: a token's result would then depend on the rest of its batch, and
reuse could not be exact.

The operators are private: where a trial run fails or differs, `F.linear` does the work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.device_experts import PlainMatrix
from afterglow.kernels.matrix import BytePanels, Panels
from afterglow.kernels.packed import PackedPanels
from afterglow.kernels.passes import rounded

PACK_ROWS = 64  # row count that the packed layout is chosen for; anything but 1 is good for all
FEW_ROWS = 4  # oneDNN is slower at 1 and 2 rows than at 4
FILL_ROWS = 256  # that are rounded at a time


class Linear(Protocol):
    """A matrix that multiplies rows."""

    inputs: int
    outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, inputs], in the dtype that the model computes in: [rows, outputs]."""
        ...

    def rows(self, start: int, stop: int) -> Linear:
        """Return the outputs from `start` to `stop` as a matrix: a copy if this one is packed."""
        ...


class Filling(Protocol):
    """A matrix that is made part by part, so that no more than one part need be in memory as the file has it."""

    def fill(self, start: int, weight: Tensor) -> None:
        """Take `weight` [rows, inputs], float32, bfloat16 or float16 on any device, as the outputs from `start` on."""
        ...

    def done(self, bias: Tensor | None) -> Linear:
        """Return the matrix, with `bias` [outputs]. All outputs must be filled; nothing can be filled afterwards."""
        ...


class PlainLinear:
    """The weight as it is, on any device."""

    __slots__ = ("_bias", "_weight", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keep `weight` [outputs, inputs] and `bias` [outputs] of the same dtype, both on the device that computes."""
        self.outputs, self.inputs = weight.shape
        self._weight, self._bias = weight, bias

    @property
    def matrix(self) -> PlainMatrix | None:
        """Return weight and bias for kernels on the device; None where they do not lie side by side in memory."""
        dense = self._weight.is_contiguous() and (self._bias is None or self._bias.is_contiguous())
        return PlainMatrix(self._weight, self._bias) if dense else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def rows(self, start: int, stop: int) -> PlainLinear:
        return PlainLinear(self._weight[start:stop], _cut(self._bias, start, stop))


class PackedLinear:
    """The weight in oneDNN's layout only. Needs `can_pack`."""

    __slots__ = ("_bias", "_packed", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """As `PlainLinear`."""
        self.outputs, self.inputs = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= FEW_ROWS or rows == 0:
            return self._product(x)
        return self._product(x.expand(FEW_ROWS, -1) if rows == 1 else F.pad(x, (0, 0, 0, FEW_ROWS - rows)))[:rows]

    def rows(self, start: int, stop: int) -> PackedLinear:
        return PackedLinear(self._packed.to_dense()[start:stop].contiguous(), _cut(self._bias, start, stop))

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class PanelLinear(Panels):
    """The weight in panels of our own. Needs the compiled kernels."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> PanelLinear:
        """See `Linear`."""
        return PanelLinear(*self.part(start, stop))


class Int8Linear:
    """Weights and rows rounded to 8 bits, sums exact in 32. Needs `int8_levels` other than 0.

    Row i of the result depends on row i of `x` alone. Float32 on CPU.
    """

    __slots__ = ("_bias", "_levels", "_packed", "_scale", "_zeros", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, levels: int = 127) -> None:
        """As `PlainLinear`; `levels`: the largest magnitude that a number of `x` is rounded to."""
        self._reserve(weight.shape[0], weight.shape[1], levels)
        self.fill(0, weight)
        self.done(bias)

    @classmethod
    def empty(cls, outputs: int, inputs: int) -> Int8Linear:
        """Return a matrix without numbers: see `Filling`."""
        matrix = cls.__new__(cls)
        matrix._reserve(outputs, inputs, int8_levels())
        return matrix

    def _reserve(self, outputs: int, inputs: int, levels: int) -> None:
        self.outputs, self.inputs, self._levels = outputs, inputs, levels
        self._scale = torch.empty(outputs, dtype=torch.float32)
        self._zeros = torch.zeros(outputs, dtype=torch.int32)
        self._packed: Tensor = torch.empty(outputs, inputs, dtype=torch.int8)

    def fill(self, start: int, weight: Tensor) -> None:
        """See `Filling`."""
        for first, piece in enumerate(torch.split(weight, FILL_ROWS)):
            rows = slice(start + first * FILL_ROWS, start + first * FILL_ROWS + len(piece))
            floats = piece.float()
            scale = floats.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny).div_(127)
            self._scale[rows] = scale
            self._packed[rows] = (floats / scale[:, None]).round_().to(torch.int8)

    def done(self, bias: Tensor | None) -> Int8Linear:
        """See `Filling`."""
        self._bias = None if bias is None else bias.float()
        self._packed = torch.ops.onednn.qlinear_prepack(self._packed, [PACK_ROWS, self.inputs])
        return self

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, self.outputs)
        numbers, scale = rounded(x, self._levels)  # unsigned, as signed ones take a slow path
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(numbers, 1.0, self._levels + 1, self._packed, self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        out.mul_(scale)
        return out if self._bias is None else out.add_(self._bias)

    def rows(self, start: int, stop: int) -> Int8Linear:
        # A unit vector is rounded to itself, so its product is a column of the rounded weights.
        columns = self(torch.eye(self.inputs))
        if self._bias is not None:
            columns -= self._bias
        return Int8Linear(columns[:, start:stop].T.contiguous(), _cut(self._bias, start, stop), levels=self._levels)


class BytePanelLinear(BytePanels):
    """Weights and rows in 8 bits, in panels of our own. Needs `has_bytes`."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> BytePanelLinear:
        """See `Linear`."""
        return BytePanelLinear(*self.part(start, stop))


class BlockLinear(PackedPanels):
    """Weights in the blocks of a quantised file, or rounded to such."""

    __slots__ = ()

    def rows(self, start: int, stop: int) -> BlockLinear:
        """See `Linear`."""
        return self.part(start, stop)


class ReorderedLinear:
    """A matrix whose inputs are in another order than the model's: activation order of GPTQ."""

    __slots__ = ("_matrix", "_order", "inputs", "outputs")

    def __init__(self, matrix: Linear, order: Tensor) -> None:
        """Keep `matrix`, and `order`, int64 [inputs]: the model's input that each of its own is."""
        self.inputs, self.outputs = matrix.inputs, matrix.outputs
        self._matrix, self._order = matrix, order

    def __call__(self, x: Tensor) -> Tensor:
        return self._matrix(x.index_select(1, self._order))

    def rows(self, start: int, stop: int) -> ReorderedLinear:
        return ReorderedLinear(self._matrix.rows(start, stop), self._order)


class StackedLinear:
    """Matrices of the same inputs, one below the other: parts of a fused one that are kept in different ways."""

    __slots__ = ("_parts", "inputs", "outputs")

    def __init__(self, parts: Sequence[Linear]) -> None:
        """Stack at least one matrix."""
        self._parts = tuple(parts)
        self.inputs, self.outputs = parts[0].inputs, sum(part.outputs for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], 1)

    def rows(self, start: int, stop: int) -> Linear:
        parts, first = [], 0
        for part in self._parts:
            inside = max(start - first, 0), min(stop - first, part.outputs)
            if inside[0] < inside[1]:
                parts.append(part.rows(*inside))
            first += part.outputs
        return parts[0] if len(parts) == 1 else StackedLinear(parts)


def _cut(bias: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if bias is None else bias[start:stop]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether packed weights work here: try a small product and compare."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    try:
        weight = torch.arange(48, dtype=dtype).reshape(6, 8) / 48
        x = torch.arange(40, dtype=dtype).reshape(5, 8) / 40
        bias = torch.arange(6, dtype=dtype)
        packed = PackedLinear(weight, bias)
        return all(torch.allclose(packed(x[:rows]), F.linear(x[:rows], weight, bias), atol=1e-5) for rows in (1, 5))
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False  # an operator that is missing or has another signature in this torch


@functools.cache
def int8_levels() -> int:
    """Return how large the numbers of a rounded row may be, so that sums are exact here: 127; 63 where products are added in
    16 bits, which overflow (processors before VNNI); 0 where the operator does not work."""
    weight = torch.ones(16, 64, dtype=torch.float32)
    weight[::2] = -1
    for levels in (127, 63):
        for rows in (1, 5, 70):
            x = torch.ones(rows, 64, dtype=torch.float32)
            x[1::2] = -1
            try:
                found = Int8Linear(weight, levels=levels)(x)
            except (RuntimeError, AttributeError, NotImplementedError, TypeError):
                return 0
            if not torch.allclose(found, x @ weight.T, rtol=1e-4):
                break
        else:
            return levels
    return 0
