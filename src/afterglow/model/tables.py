"""Matrices as they come from files: in blocks, and as tables whose rows are looked up by number."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.device_products import RoundedMatrix
from afterglow.kernels.packed import BLOCK_FORMATS, dequantize


class PackedTensor(NamedTuple):
    """A matrix in blocks: uint8 [outputs, bytes of a row], of a format in `afterglow.kernels.packed`, or `device_blocks.FLOATS`.

    `order`, int64 [inputs]: the input that each place of a row is for; None if they are in their own order.
    """

    blocks: Tensor
    block_format: str
    order: Tensor | None = None


class Table(Protocol):
    """A matrix [rows, width] whose rows are looked up."""

    device: torch.device

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids`, int64 [n], in `dtype`: [n, width]."""
        ...


class PlainTable:
    """Rows as they are; they may be narrower than the arithmetic, since widening looked-up rows is exact."""

    __slots__ = ("device", "weight")

    def __init__(self, weight: Tensor) -> None:
        """Keep `weight` [rows, width]."""
        self.device, self.weight = weight.device, weight

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.weight).to(dtype)


class BlockTable:
    """Rows in blocks, dequantised as they are looked up. On CPU."""

    __slots__ = ("block_format", "blocks", "device", "width")

    def __init__(self, blocks: Tensor, block_format: str) -> None:
        """Keep `blocks`, uint8 [rows, bytes of a row]; formats: `afterglow.kernels.packed`."""
        self.device, self.blocks, self.block_format = blocks.device, blocks, block_format
        about = BLOCK_FORMATS[block_format]
        self.width = blocks.shape[1] // about.num_bytes * about.weights

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(F.embedding(ids, self.blocks), self.block_format).to(dtype)


class DeviceTable:
    """Rows in 8 or 4 bits on CUDA, widened as they are looked up. A head may multiply with the same matrix."""

    __slots__ = ("device", "matrix")

    def __init__(self, matrix: RoundedMatrix) -> None:
        """Keep a matrix, whose outputs are the rows."""
        self.device, self.matrix = matrix.numbers.device, matrix

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.matrix.looked_up(ids, dtype)
