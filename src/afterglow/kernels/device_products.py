"""Matrices in 8 or 4 bits on CUDA, whole numbers or floats. The weights alone are rounded, not the rows that they multiply, and sums are of floats.

Few rows, as decoding has them, are multiplied by a kernel of Triton's, which reads the narrow weights; for many, and where it is
not used, the weights are widened piece by piece to the rows' dtype, and torch multiplies. Both multiply with the same weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.block_rounding import round_to_blocks
from afterglow.kernels.gate import Gate
from afterglow.kernels.packed import GROUP

MOST_ROWS = 128  # that the kernel multiplies: two tiles, and each reads and widens all weights
PIECE = 2**24  # weights that are widened at a time
ROUND_ROWS = 256  # of weights that are rounded, or split, at a time
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MOST = 448  # the largest magnitude

_gate = Gate("triton_products")


class Kind(NamedTuple):
    """How weights are kept. `group`: inputs that share a scale, 0 for all of them; `offset`: its dtype, None without one; `coded`: numbers
    are floats, of 4 bits (MXFP4) or 8 (e4m3)."""

    bits: int
    group: int
    scale: torch.dtype
    offset: torch.dtype | None = None
    coded: bool = False

    @property
    def less(self) -> int:
        """What a number of 4 bits is less than what its bits say."""
        signed = self.offset is None or not self.offset.is_floating_point
        return 8 if self.bits == 4 and signed and not self.coded else 0

    @property
    def shift(self) -> int:
        """What an offset does: 0 if there is none, 1 if it comes off a number, 2 if it is added to the product."""
        return 0 if self.offset is None else 2 if self.offset.is_floating_point else 1

    @property
    def size(self) -> int:
        """How many inputs share a scale, for the kernels, which do not ask where all do."""
        return self.group or GROUP


class RoundedMatrix:
    """A matrix [outputs, inputs] of numbers in 8 bits, int8 or float8_e4m3fn [outputs, inputs], or 4, uint8 [outputs, inputs / 2], with
    scales [outputs, groups]: one for each 32 or 16 inputs, or one for each output.

    A weight is number * scale; with an `offset` [outputs, groups] of whole numbers (number - offset) * scale, with one of floats
    number * scale + offset. In 4 bits, 16 bytes are a group's 32 numbers: the first half in the low bits, the other in the high
    ones. They stand for themselves if there is an offset of floats, else for 8 less; `coded`: for floats of 4 bits (MXFP4), doubled.
    """

    __slots__ = ("bias", "coded", "inputs", "kind", "numbers", "offset", "outputs", "scale")

    def __init__(
        self,
        numbers: Tensor,
        scale: Tensor,
        inputs: int,
        bias: Tensor | None = None,
        *,
        offset: Tensor | None = None,
        coded: bool = False,
    ) -> None:
        """`bias` [outputs], in the dtype of the rows. All are on the device that computes, and all but the bias contiguous."""
        self.numbers, self.scale, self.bias, self.offset = numbers, scale, bias, offset
        self.coded = coded or numbers.dtype == FLOAT8
        self.inputs, self.outputs = inputs, numbers.shape[0]
        bits = 4 if numbers.dtype == torch.uint8 else 8
        group = 0 if bits == 8 and scale.shape[1] == 1 else inputs // scale.shape[1]
        self.kind = Kind(bits, group, scale.dtype, None if offset is None else offset.dtype, self.coded)

    @property
    def num_bytes(self) -> int:
        """The memory of the weights."""
        return sum(part.nbytes for part in (self.numbers, self.scale, self.offset) if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, inputs], float32, bfloat16 or float16: [rows, outputs]."""
        if x.device.type == "cuda" and x.shape[0] <= MOST_ROWS and x.stride(1) == 1:
            found: Tensor | None = _gate.run(lambda kernels: kernels.multiply(x, self), x.device, x.dtype, self.kind)
            if found is not None:
                return found
        return self.by_torch(x)

    def by_torch(self, x: Tensor) -> Tensor:
        """Multiply by torch's operators."""
        step = max(1, PIECE // self.inputs)
        parts = [
            F.linear(x, self.widened(at, at + step, x.dtype), None if self.bias is None else self.bias[at : at + step])
            for at in range(0, self.outputs, step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def widened(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of the outputs from `start` to `stop`, [outputs, inputs]."""
        numbers, scale = self.numbers[start:stop], self.scale[start:stop, :, None].float()
        offset = None if self.offset is None else self.offset[start:stop, :, None]
        if self.kind.bits == 4:
            packed = numbers.view(*scale.shape[:2], GROUP // 2)
            codes = torch.cat((packed & 15, packed >> 4), -1)
            floats = _decoded(codes) if self.coded else codes.float() - self.kind.less
        else:
            floats = numbers.view(*scale.shape[:2], -1).float()
        if offset is None:
            floats = floats * scale
        elif offset.is_floating_point():
            floats = floats * scale + offset.float()
        else:
            floats = (floats - offset) * scale
        return floats.flatten(1).to(dtype)

    def rows(self, start: int, stop: int) -> RoundedMatrix:
        """Return the outputs from `start` to `stop` as a matrix, which shares this one's memory."""
        bias = None if self.bias is None else self.bias[start:stop]
        offset = None if self.offset is None else self.offset[start:stop]
        numbers, scale = self.numbers[start:stop], self.scale[start:stop]
        return RoundedMatrix(numbers, scale, self.inputs, bias, offset=offset, coded=self.coded)

    def looked_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the outputs `ids`, int64 [n]: [n, inputs]."""
        offset = None if self.offset is None else self.offset.index_select(0, ids)
        numbers, scale = self.numbers.index_select(0, ids), self.scale.index_select(0, ids)
        found = RoundedMatrix(numbers, scale, self.inputs, offset=offset, coded=self.coded)
        return found.widened(0, len(ids), dtype)

    def with_parts(self, scale: torch.dtype, offset: torch.dtype | None) -> RoundedMatrix:
        """Return the same weights with scales and offsets of dtypes that hold them; the numbers share this one's memory."""
        offsets = self.offset
        if offset is not None:
            offsets = torch.zeros_like(self.scale, dtype=offset) if offsets is None else offsets.to(offset)
        return RoundedMatrix(
            self.numbers, self.scale.to(scale), self.inputs, self.bias, offset=offsets, coded=self.coded
        )

    def with_bias(self, bias: Tensor | None) -> RoundedMatrix:
        """Return the matrix with another bias; it shares this one's memory."""
        return RoundedMatrix(self.numbers, self.scale, self.inputs, bias, offset=self.offset, coded=self.coded)


def _decoded(codes: Tensor) -> Tensor:
    """Return what numbers of MXFP4, uint8, stand for: `packed.MXFP4_VALUES`. By arithmetic: a table would lie on one device."""
    size = (codes & 7).to(torch.int16)
    large = (2 + (size & 1)) << (size >> 1).sub(1).clamp_min(0)
    return torch.where(size < 2, size, large).mul_(1 - 2 * (codes >> 3).to(torch.int16)).float()


class RoundedFilling:
    """A matrix whose parts are rounded as they come, on the CPU: the same numbers as a CPU has."""

    def __init__(
        self, outputs: int, inputs: int, device: torch.device, bits: int, *, grouped: bool, floats: bool = False
    ) -> None:
        """Make room on the device. `grouped`: a scale for each 32 inputs; 4 bits have that always. `floats`: numbers of 8 bits are e4m3."""
        self._inputs, self._bits, self._grouped, self._floats = inputs, bits, grouped, floats
        width, kind = (inputs // 2, torch.uint8) if bits == 4 else (inputs, FLOAT8 if floats else torch.int8)
        groups, scales = (inputs // GROUP, torch.float16) if grouped else (1, torch.float32)
        self._numbers = torch.empty(outputs, width, dtype=kind, device=device)
        self._scale = torch.empty(outputs, groups, dtype=scales, device=device)

    def fill(self, start: int, weight: Tensor) -> None:
        """Round `weight` [rows, inputs], float32, bfloat16 or float16 on any device, to the outputs from `start` on."""
        for at in range(0, weight.shape[0], ROUND_ROWS):
            piece = weight[at : at + ROUND_ROWS].cpu()
            numbers, scale = rounded_rows(piece, self._bits, self._grouped, self._floats)
            rows = slice(start + at, start + at + len(numbers))
            self._numbers[rows].copy_(numbers)
            self._scale[rows].copy_(scale)

    def done(self, bias: Tensor | None) -> RoundedMatrix:
        """Return the filled matrix, with `bias` [outputs]."""
        return RoundedMatrix(self._numbers, self._scale, self._inputs, bias)


def rounded_rows(weight: Tensor, bits: int, grouped: bool, floats: bool = False) -> tuple[Tensor, Tensor]:
    """Round `weight` [rows, inputs] on CPU: numbers and scales as `RoundedMatrix` has them."""
    if grouped:
        blocks = round_to_blocks(weight, "Q4_0" if bits == 4 else "Q8_0")
        parts = blocks.view(blocks.shape[0], -1, 2 + GROUP * bits // 8)
        numbers = parts[..., 2:].flatten(1).contiguous()
        scale = parts[..., :2].contiguous().view(torch.float16)[..., 0]
        return numbers if bits == 4 else numbers.view(torch.int8), scale
    exact = weight.float()
    most = exact.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    if floats:
        scale = most.div_(FLOAT8_MOST)
        return (exact / scale).to(FLOAT8), scale
    scale = most.div_(127)
    return (exact / scale).round_().to(torch.int8), scale
