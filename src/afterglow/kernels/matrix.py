"""Products of rows with a matrix that is kept in panels: see `native/matrix.c`, and for 8 bits `native/bytes.c`.

Measured on one core (AMD with AVX-512), a matrix of 4,096 x 768 that comes from memory, against oneDNN's packed weights: 1 row
0.34 to 0.41 ms (38 GB/s), 8 rows 0.35 to 0.52, 16 rows 0.53 to 0.74, 64 rows 1.9 to 2.0, 256 rows 7.4 to 7.5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.built import native
from afterglow.kernels.memory import empty

BYTE_LANES = 32  # outputs of a panel in 8 bits


class Panels:
    """A float32 matrix [outputs, inputs] on CPU; only where `native` is there. Holds its only copy."""

    __slots__ = ("_bias", "_library", "_panels", "_width", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [outputs, inputs], `bias` [outputs]."""
        library = native()
        assert library is not None, "asked for what has not been built"
        self._library, self._width = library, library.afterglow_width_3()
        self.outputs, self.inputs = weight.shape
        lanes = 2 * self._width
        count = -(-self.outputs // lanes)
        spare = count * lanes - self.outputs
        self._panels = empty((count, self.inputs, lanes), torch.float32)
        whole = self.outputs // lanes
        self._panels[:whole] = weight[: whole * lanes].view(whole, lanes, self.inputs).transpose(1, 2)
        if spare:
            self._panels[whole] = 0
            self._panels[whole, :, : lanes - spare] = weight[whole * lanes :].T
        self._bias = None if bias is None else F.pad(bias.float(), (0, spare))

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs], float32 -> [rows, outputs]."""
        if x.stride(1) != 1 and self.inputs > 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.outputs)
        panels, bias, *_ = self.parts()
        failed = self._library.afterglow_multiply_3(
            *(x.data_ptr(), x.stride(0), x.shape[0], self.inputs, panels, self.outputs, bias, 0, out.data_ptr()),
            *(torch.get_num_threads(), self._width),
        )
        if failed:
            raise MemoryError(f"no memory to copy {x.shape[0]} rows of {self.inputs} numbers")
        return out

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the outputs from `start` to `stop`: copies."""
        weight = self._panels.transpose(1, 2).reshape(-1, self.inputs)[start:stop]
        return weight, None if self._bias is None else self._bias[start:stop].clone()

    def parts(self) -> tuple[int, int, int, int, int]:
        """As `native/block.c` wants it: panels, bias (0: none), inputs, outputs, and that they are not bytes."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return self._panels.data_ptr(), bias, self.inputs, self.outputs, 0


class BytePanels:
    """A matrix [outputs, inputs] rounded to 8 bits, with a scale for each output; what it is multiplied with is rounded with a
    scale for each row. Float32 on CPU; only where `has_bytes`."""

    __slots__ = ("_biased", "_factors", "_library", "_panels", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [outputs, inputs], `bias` [outputs]."""
        library = native()
        assert library is not None, "asked for what has not been built"
        self._library = library
        self.outputs, self.inputs = weight.shape
        count, steps = -(-self.outputs // BYTE_LANES), -(-self.inputs // 4)
        scale = weight.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny).div_(127)
        numbers = torch.zeros(count * BYTE_LANES, steps * 4, dtype=torch.int8)
        numbers[: self.outputs, : self.inputs] = (weight / scale[:, None]).round_()
        self._panels = empty((count, steps, BYTE_LANES, 4), torch.int8)
        self._panels.copy_(numbers.view(count, BYTE_LANES, steps, 4).transpose(1, 2))
        self._factors = torch.zeros(count, 3, BYTE_LANES)
        spare = count * BYTE_LANES - self.outputs
        self._factors[:, 0].view(torch.int32).copy_((128 * numbers.sum(1, dtype=torch.int32)).view(count, BYTE_LANES))
        self._factors[:, 1] = F.pad(scale, (0, spare)).view(count, BYTE_LANES)
        self._biased = bias is not None
        if bias is not None:
            self._factors[:, 2] = F.pad(bias.float(), (0, spare)).view(count, BYTE_LANES)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs], float32 -> [rows, outputs]."""
        if x.stride(1) != 1 and self.inputs > 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.outputs)
        failed = self._library.afterglow_multiply_bytes_3(
            *(x.data_ptr(), x.stride(0), x.shape[0], self.inputs, self._panels.data_ptr(), self.outputs),
            *(self._factors.data_ptr(), 0, out.data_ptr(), torch.get_num_threads()),
        )
        if failed:
            raise MemoryError(f"no memory to round {x.shape[0]} rows of {self.inputs} numbers")
        return out

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Rounded weight and bias of the outputs from `start` to `stop`: copies."""
        numbers = self._panels.transpose(1, 2).reshape(-1, self._panels.shape[1] * 4)[start:stop, : self.inputs]
        scale, bias = (self._factors[:, which].flatten()[start:stop] for which in (1, 2))
        return numbers * scale[:, None], bias if self._biased else None

    def parts(self) -> tuple[int, int, int, int, int]:
        """As `native/block.c` wants it: panels, factors, inputs, outputs, and that they are bytes."""
        return self._panels.data_ptr(), self._factors.data_ptr(), self.inputs, self.outputs, 1


def has_bytes() -> bool:
    """Whether products in 8 bits have been built, and this processor has them."""
    library = native()
    return library is not None and bool(library.afterglow_bytes_3())
