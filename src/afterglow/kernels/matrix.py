"""Products of rows with a matrix that is kept in panels: see `native/matrix.c`.

Measured on one core (AMD with AVX-512), a matrix of 4,096 x 768 that comes from memory, against oneDNN's packed weights: 1 row
0.34 to 0.41 ms (38 GB/s), 8 rows 0.35 to 0.52, 16 rows 0.53 to 0.74, 64 rows 1.9 to 2.0, 256 rows 7.4 to 7.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.kernels.built import native
from afterglow.kernels.memory import empty


class Panels:
    """A float32 matrix [outputs, inputs] on CPU; only where `native` is there. Holds its only copy."""

    __slots__ = ("_bias", "_library", "_panels", "_width", "inputs", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [outputs, inputs], `bias` [outputs]."""
        library = native()
        assert library is not None, "asked for what has not been built"
        self._library, self._width = library, library.afterglow_width_2()
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
        self._bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, spare))

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs], float32 -> [rows, outputs]."""
        if x.stride(1) != 1 and self.inputs > 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.outputs)
        failed = self._library.afterglow_multiply_2(
            *(x.data_ptr(), x.stride(0), x.shape[0], self.inputs, self._panels.data_ptr(), self.outputs),
            *(
                None if self._bias is None else self._bias.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
                self._width,
            ),
        )
        if failed:
            raise MemoryError(f"no memory to copy {x.shape[0]} rows of {self.inputs} numbers")
        return out

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the outputs from `start` to `stop`: copies."""
        weight = self._panels.transpose(1, 2).reshape(-1, self.inputs)[start:stop]
        return weight, None if self._bias is None else self._bias[start:stop].clone()
