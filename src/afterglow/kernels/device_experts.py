"""A mixture of experts on CUDA for few rows, by kernels of Triton's behind their gate: each row's experts are read where they are chosen.

Rows of one expert as one product need to know, on the host, which rows these are: that waits for the device, and launches other work
each time. Here a program reads the number of its expert on the device, and from it where the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.device_products import Kind, RoundedMatrix
from afterglow.kernels.gate import Gate

MOST_ROWS = 128
# Choices of experts that the kernels take, for each expert there is. They multiply each choice by itself, without tensor cores, and
# one product for each expert takes launches for each: that is worth it the sooner, the more weights an expert has.
CHOICES = 3
LAUNCHES = 10**8  # weights that are multiplied by one row in the time of an expert's launches, about
ALIGNED = 16  # numbers that begin at a multiple are read in wide loads

_gate = Gate("triton_experts")


class PlainMatrix(NamedTuple):
    """A contiguous matrix [outputs, inputs] in the dtype of the rows, and its bias [outputs]."""

    numbers: Tensor
    bias: Tensor | None = None

    def by_torch(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, inputs]: [rows, outputs]."""
        return F.linear(x, self.numbers, self.bias)


Matrix: TypeAlias = PlainMatrix | RoundedMatrix


class Stack:
    """Where matrices of one kind and size are. `places`, int64 [matrices, 4] on the device: where the numbers, scales, offsets and
    bias of each begin, in elements from those of the first one."""

    __slots__ = ("aligned", "first", "inputs", "kind", "matrices", "outputs", "places")

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = matrices
        self.first = first = matrices[0]
        self.kind: Kind | None = first.kind if isinstance(first, RoundedMatrix) else None
        self.outputs = first.numbers.shape[0]
        self.inputs = first.inputs if isinstance(first, RoundedMatrix) else first.numbers.shape[1]
        places = [
            [0 if part is None or base is None else _between(base, part) for part, base in zip(*both, strict=True)]
            for both in ((_parts(each), _parts(first)) for each in matrices)
        ]
        self.aligned = all(each[0] % ALIGNED == 0 for each in places)
        self.places = torch.tensor(places, dtype=torch.int64).to(first.numbers.device)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the numbers, scales, offsets and bias of the first matrix."""
        return _parts(self.first)


def _parts(matrix: Matrix) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(matrix, PlainMatrix):
        return matrix.numbers, None, None, matrix.bias
    return matrix.numbers, matrix.scale, matrix.offset, matrix.bias


def _layout(matrix: Matrix) -> tuple[object, ...]:
    kind = matrix.kind if isinstance(matrix, RoundedMatrix) else None
    return kind, matrix.numbers.shape, matrix.numbers.dtype, None if matrix.bias is None else matrix.bias.dtype


def _between(first: Tensor, other: Tensor) -> int:
    return (other.data_ptr() - first.data_ptr()) // first.element_size()


class ExpertTables:
    """Where the weights of a layer's experts are. `wide` [2 * inner, hidden] have gates and, behind them, values, `narrow` is
    [hidden, inner]; between them are SiLU, or what `passes.gated_clamped` does with `clamp`."""

    __slots__ = ("clamp", "device", "hidden", "inner", "narrow", "wide")

    def __init__(
        self, wide: Sequence[Matrix], narrow: Sequence[Matrix], clamp: tuple[float, float] | None = None
    ) -> None:
        """Take matrices on one device. Those of a side are of one kind and size."""
        self.wide, self.narrow, self.clamp = Stack(wide), Stack(narrow), clamp
        self.hidden, self.inner = self.narrow.outputs, self.narrow.inputs
        self.device = wide[0].numbers.device

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what a trial of the kernels depends on, beside device and dtype."""
        biased = self.wide.first.bias is not None, self.narrow.first.bias is not None
        return self.wide.kind, self.narrow.kind, *biased, self.clamp


def expert_tables(
    wide: Sequence[Matrix], narrow: Sequence[Matrix], clamp: tuple[float, float] | None
) -> ExpertTables | None:
    """Return the tables of matrices; None if those of a side are of several sizes, or are kept in several ways."""
    wide, narrow = _alike(wide), _alike(narrow)
    if any(len(set(map(_layout, side))) > 1 for side in (wide, narrow)):
        return None
    return ExpertTables(wide, narrow, clamp)


def _alike(matrices: Sequence[Matrix]) -> Sequence[Matrix]:
    """Give matrices scales and offsets of the same dtypes, which hold those of all: each was kept in the fewest bits."""
    rounded = [each for each in matrices if isinstance(each, RoundedMatrix)]
    if len(rounded) < len(matrices) or len({each.kind for each in rounded}) == 1:
        return matrices
    scale = reduce(torch.promote_types, (each.scale.dtype for each in rounded))
    offsets = [each.offset.dtype for each in rounded if each.offset is not None]
    return [each.with_parts(scale, reduce(torch.promote_types, offsets) if offsets else None) for each in rounded]


def most_rows(tables: ExpertTables, taken: int) -> int:
    """Return for how many rows, if each takes so many experts, the kernels are likely faster than a product for each expert."""
    weights = 3 * tables.hidden * tables.inner
    return min(MOST_ROWS, len(tables.wide.matrices) * (CHOICES * weights + LAUNCHES) // (weights * taken))


def usable_rows(tables: ExpertTables, dtype: torch.dtype, taken: int) -> int:
    """Return how many rows of `dtype` the kernels may be used for, 0 for none. May wait for the device."""
    return most_rows(tables, taken) if _gate.passes(tables.device, dtype, *tables.kind) else 0


def chosen_experts(x: Tensor, weights: Tensor, chosen: Tensor, tables: ExpertTables) -> Tensor | None:
    """Compute [rows, hidden] from `x` of the same shape: the sum of what the experts `chosen`, int64 [rows, experts of a row], make of a row,
    times `weights` of that shape and the dtype of `x`. None: torch must do it."""
    if len(x) > most_rows(tables, chosen.shape[1]) or x.stride(1) != 1:
        return None
    return _gate.run(
        lambda kernels: kernels.chosen_experts(x, weights, chosen, tables), x.device, x.dtype, *tables.kind
    )
