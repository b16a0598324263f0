"""Products of rows with a matrix in panels: see `native/matrix.c`, and for 8 bits `native/bytes.c`.

Measured on one core (AMD with AVX-512), a matrix of 4,096 x 768 that comes from memory, against oneDNN's packed weights: 1 row
0.34 to 0.41 ms (38 GB/s), 8 rows 0.35 to 0.52, 16 rows 0.53 to 0.74, 64 rows 1.9 to 2.0, 256 rows 7.4 to 7.5.
"""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.built import native
from afterglow.memory.pages import LARGE, allocate

BYTE_LANES = 32  # outputs of a panel in 8 bits
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # AFTERGLOW_FLOAT32 and so on


class Panels:
    """A float32 matrix [outputs, inputs] on CPU; no other copy is kept. Needs the compiled kernels."""

    __slots__ = ("_bias", "_library", "_panels", "_width", "inputs", "matrix", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Reorder `weight` [outputs, inputs]; `bias` [outputs]."""
        library = native()
        assert library is not None, "there are no compiled kernels"
        self._library, self._width = library, library.width
        self.outputs, self.inputs = weight.shape
        lanes = 2 * self._width
        count = -(-self.outputs // lanes)
        spare = count * lanes - self.outputs
        self._panels = on_huge_pages(torch.float32, count, self.inputs, lanes)
        whole = self.outputs // lanes
        self._panels[:whole] = weight[: whole * lanes].view(whole, lanes, self.inputs).transpose(1, 2)
        if spare:
            self._panels[whole] = 0
            self._panels[whole, :, : lanes - spare] = weight[whole * lanes :].T
        self._bias = None if bias is None else F.pad(bias.float(), (0, spare))
        terms = 0 if self._bias is None else self._bias.data_ptr()
        self.matrix = library.new("afterglow_matrix *", (self._panels.data_ptr(), terms, self.inputs, self.outputs, 0))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, inputs], float32: [rows, outputs]. Raises: MemoryError."""
        if x.stride(1) != 1 and self.inputs > 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.outputs, dtype=torch.float32)
        failed = self._library.lib.afterglow_multiply(
            *(self.matrix, x.data_ptr(), x.stride(0), x.shape[0], 0, out.data_ptr()),
            *(torch.get_num_threads(), self._width),
        )
        if failed:
            raise MemoryError(f"no memory to copy {x.shape[0]} rows of {self.inputs} numbers")
        return out

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the outputs from `start` to `stop`: copies."""
        weight = self._panels.transpose(1, 2).reshape(-1, self.inputs)[start:stop]
        return weight, None if self._bias is None else self._bias[start:stop].clone()


class BytePanels:
    """A matrix [outputs, inputs] rounded to 8 bits, with a scale for each output. The rows that it multiplies are rounded as
    well, with a scale for each row. Float32 on CPU; needs `has_bytes()`."""

    __slots__ = ("_biased", "_factors", "_library", "_panels", "inputs", "matrix", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Round `weight` [outputs, inputs]; `bias` [outputs]."""
        self._reserve(*weight.shape)
        self.fill(0, weight)
        self.done(bias)

    @classmethod
    def empty(cls, outputs: int, inputs: int) -> Self:
        """Return a matrix without numbers, for `fill` to write all outputs of, and then `done`."""
        matrix = cls.__new__(cls)
        matrix._reserve(outputs, inputs)
        return matrix

    def _reserve(self, outputs: int, inputs: int) -> None:
        library = native()
        assert library is not None, "there are no compiled kernels"
        self._library = library
        self.outputs, self.inputs = outputs, inputs
        count, steps = -(-outputs // BYTE_LANES), -(-inputs // 4)
        self._panels = on_huge_pages(torch.int8, count, steps, BYTE_LANES, 4)
        self._panels[-1:] = 0  # may have lanes without an output
        self._factors = torch.zeros(count, 3, BYTE_LANES, dtype=torch.float32)
        self._biased = False
        panels, terms = self._panels.data_ptr(), self._factors.data_ptr()
        self.matrix = library.new("afterglow_matrix *", (panels, terms, inputs, outputs, 1))

    def fill(self, start: int, weight: Tensor) -> None:
        """Round `weight` [rows, inputs], float32, bfloat16 or float16, to the outputs from `start` on. No other copy is made."""
        assert weight.shape[1] == self.inputs
        assert start + weight.shape[0] <= self.outputs
        weight = weight.contiguous()
        rows = (weight.data_ptr(), *weight.shape, KINDS[weight.dtype])
        self._library.lib.afterglow_fill_bytes(
            *(self._library.new("afterglow_rows *", rows), start),
            *(self._panels.data_ptr(), self._factors.data_ptr(), torch.get_num_threads()),
        )

    def done(self, bias: Tensor | None) -> Self:
        """Return the filled matrix, with `bias` [outputs]."""
        self._biased = bias is not None
        if bias is not None:
            spare = self._factors.shape[0] * BYTE_LANES - self.outputs
            self._factors[:, 2] = F.pad(bias.float(), (0, spare)).view(-1, BYTE_LANES)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, inputs], float32: [rows, outputs]. Raises: MemoryError."""
        if x.stride(1) != 1 and self.inputs > 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.outputs, dtype=torch.float32)
        failed = self._library.lib.afterglow_multiply_bytes(
            *(self.matrix, x.data_ptr(), x.stride(0), x.shape[0], 0, out.data_ptr(), torch.get_num_threads())
        )
        if failed:
            raise MemoryError(f"no memory to round {x.shape[0]} rows of {self.inputs} numbers")
        return out

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return the rounded weight and the bias of the outputs from `start` to `stop`: copies."""
        numbers = self._panels.transpose(1, 2).reshape(-1, self._panels.shape[1] * 4)[start:stop, : self.inputs]
        scale, bias = (self._factors[:, which].flatten()[start:stop] for which in (1, 2))
        return numbers * scale[:, None], bias if self._biased else None


def on_huge_pages(dtype: torch.dtype, *shape: int) -> Tensor:
    """Make an empty tensor on CPU: decoding with weights on huge pages takes 14.8 instead of 15.9 ms a token."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(allocate(num_bytes)).view(dtype).view(shape)


def has_bytes() -> bool:
    """Return whether there is a compiled kernel for products in 8 bits, and this processor has the instructions."""
    library = native()
    return library is not None and bool(library.lib.afterglow_bytes())
