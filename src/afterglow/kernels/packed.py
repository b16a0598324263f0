"""Matrices in blocks: 4 to 8 bits a weight with a scale for each group, as GGUF files have them, multiplied without unrounding them.

A *block* is 32 or 256 weights of one output with their scales, a *group* the 32 (Q6_K: 16) of them that share one. A weight is
scale * number, for formats with a minimum scale * number + minimum. Rows of activations are rounded to 8 bits with a scale for
every 32 inputs; the products of numbers are summed up exactly in a group, so that a row's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.built import native
from afterglow.kernels.matrix import on_huge_pages

PANEL = 16  # outputs of a panel
GROUP = 32  # inputs that share a scale of the activations
LEVELS = 127  # that an activation's magnitude is rounded to
LEAST_PEAK = 1e-30  # of a group of activations: its reciprocal is finite

# What the numbers of MXFP4 mean: floats of 4 bits, doubled.
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Groups(NamedTuple):
    """Weights as numbers and scales: number * scale, plus the minimum where there is one."""

    numbers: Tensor  # int16 [outputs, groups, weights of a group]
    scale: Tensor  # float32 [outputs, groups]
    minimum: Tensor | None  # as `scale`


@dataclass(frozen=True)
class BlockFormat:
    """A type of weights in blocks. `bits` of a number; `groups` splits blocks uint8 [outputs, blocks, num_bytes]."""

    weights: int
    num_bytes: int
    bits: int
    groups: Callable[[Tensor], Groups]

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a row of `inputs` weights. Raises: ValueError if they are no whole number of blocks."""
        if inputs % self.weights:
            raise ValueError(f"{inputs} inputs are no whole number of blocks of {self.weights} weights")
        return inputs // self.weights * self.num_bytes


def dequantize(blocks: Tensor, block_format: str) -> Tensor:
    """Return the weights, float32 [outputs, inputs], of `blocks`, uint8 [outputs, bytes of a row]."""
    numbers, scale, minimum = split(blocks, block_format)
    weights = numbers * scale[..., None]
    if minimum is not None:
        weights += minimum[..., None]
    return weights.flatten(1)


def split(blocks: Tensor, block_format: str) -> Groups:
    """Return the numbers and scales of `blocks`, uint8 [outputs, bytes of a row].

    Raises: ValueError if the format is unknown, or rows are no whole number of blocks.
    """
    check(blocks, block_format)
    kind = BLOCK_FORMATS[block_format]
    return kind.groups(_runs(blocks, kind.num_bytes))


def joined(blocks: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """Return the rows of `blocks` as one tensor; see `PackedPanels`."""
    whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))
    return whole if order is None else whole[order]


def check(blocks: Tensor, block_format: str) -> None:
    """Raise ValueError if the format is unknown, or rows of `blocks` are no whole number of blocks."""
    if block_format not in BLOCK_FORMATS:
        raise ValueError(f"unknown block format {block_format!r}: known are {', '.join(BLOCK_FORMATS)}")
    kind = BLOCK_FORMATS[block_format]
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % kind.num_bytes:
        raise ValueError(
            f"rows of {block_format} are bytes in blocks of {kind.num_bytes}, not {blocks.dtype} {tuple(blocks.shape)}"
        )


def asymmetric_blocks(numbers: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return rows of the format A4 (`bits` 4) or A8 (8): weights are scale * (number - zero).

    `numbers`, uint8 [outputs, inputs], are below 2 ** bits; `scale` [outputs, inputs / 32], float32; `zero`, uint8, as `scale`.
    """
    numbers = _runs(numbers, GROUP)
    if bits == 4:
        numbers = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
    parts = (scale.float().contiguous()[..., None].view(torch.uint8), zero[..., None], numbers)
    return torch.cat(parts, -1).flatten(1)


def rounded_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` [rows, inputs] to signed 8 bits: (int8 [rows, groups, 32], scale float32 [rows, groups]).

    `x` is about numbers * scale; the largest magnitude of a group becomes 127.
    """
    x = _runs(x, GROUP)
    peak = x.abs().amax(-1).clamp_min_(LEAST_PEAK)
    by = torch.full_like(peak, LEVELS).div_(peak)  # a number divided by a tensor is rounded twice: times its reciprocal
    numbers = (x * by[..., None]).round_()
    return numbers.to(torch.int8), peak / LEVELS


class PackedPanels:
    """A matrix [outputs, inputs] in blocks. Float32 on CPU; torch multiplies where there are no compiled kernels.

    `matrix` is the compiled kernels' view of it, or None without them; `num_bytes` of memory hold it.
    """

    __slots__ = ("_bias", "_first", "_groups", "_library", "_panels", "inputs", "matrix", "num_bytes", "outputs")

    def __init__(
        self,
        blocks: Tensor | Sequence[Tensor],
        block_format: str,
        inputs: int,
        bias: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Copy `blocks`, uint8 [outputs, bytes of a row], the rows exactly as in a file; of several tensors the rows follow each other.
        `bias` [outputs]. `order`, int64 [outputs]: the row that each output is; None if they are in order.

        Raises: ValueError if the format is unknown, or its rows of `inputs` weights have other sizes.
        """
        stacked = [blocks] if isinstance(blocks, Tensor) else blocks
        for each in stacked:
            check(each, block_format)
            if BLOCK_FORMATS[block_format].row_bytes(inputs) != each.shape[1]:
                raise ValueError(f"a row of {each.shape[1]} bytes of {block_format} has not {inputs} inputs")
        self.inputs, self.outputs = inputs, sum(each.shape[0] for each in stacked)
        self.matrix: Any = None
        self._library = native()
        self._first = 0  # a part may begin inside a panel
        if self._library is None:
            self._groups = split(joined(stacked, order), block_format)
            self._bias = None if bias is None else bias.float()
            self.num_bytes = sum(part.nbytes for part in self._groups if part is not None)
            return
        number = getattr(self._library.lib, f"AFTERGLOW_{block_format}")
        count = -(-self.outputs // PANEL)
        self._panels = on_huge_pages(torch.uint8, count, self._library.lib.afterglow_panel_bytes(number, inputs))
        self._bias = None if bias is None else F.pad(bias.float(), (0, count * PANEL - self.outputs))
        self.num_bytes = self._panels.nbytes
        self.matrix = self._view(number)
        stacked = [each if each.stride(1) == 1 else each.contiguous() for each in stacked]
        rows = torch.cat([each.data_ptr() + each.stride(0) * torch.arange(each.shape[0]) for each in stacked])
        rows = rows if order is None else rows[order]
        self._library.lib.afterglow_pack(self.matrix, rows.data_ptr(), torch.get_num_threads())

    def _view(self, block_format: int) -> Any:
        """Describe the panels to the compiled kernels."""
        assert self._library is not None
        terms = 0 if self._bias is None else self._bias.data_ptr()
        outputs = self._first + self.outputs
        return self._library.new(
            "afterglow_matrix *", (self._panels.data_ptr(), terms, self.inputs, outputs, block_format)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, inputs], float32: [rows, outputs]. Raises: MemoryError."""
        if self._library is None:
            return _product(x, self._groups, self._bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self._first + self.outputs, dtype=torch.float32)
        failed = self._library.lib.afterglow_multiply_packed(
            *(self.matrix, x.data_ptr(), x.stride(0), x.shape[0], 0, out.data_ptr()),
            *(torch.get_num_threads(), self._library.width),
        )
        if failed:
            raise MemoryError(f"no memory to round {x.shape[0]} rows of {self.inputs} numbers")
        return out[:, self._first :]

    def part(self, start: int, stop: int) -> Self:
        """Return the outputs from `start` to `stop` as a matrix; with the compiled kernels it shares this one's memory."""
        part = object.__new__(type(self))
        part.inputs, part.outputs, part._library, part._first = self.inputs, stop - start, self._library, 0
        if self._library is None:
            numbers, scale, minimum = self._groups
            part._groups = Groups(
                numbers[start:stop], scale[start:stop], None if minimum is None else minimum[start:stop]
            )
            part._bias = None if self._bias is None else self._bias[start:stop]
            part.matrix, part.num_bytes = None, sum(piece.nbytes for piece in part._groups if piece is not None)
            return part
        first, part._first = divmod(self._first + start, PANEL)
        end = -(-(self._first + stop) // PANEL)
        part._panels = self._panels[first:end]
        part._bias = None if self._bias is None else self._bias[first * PANEL : end * PANEL]
        part.num_bytes = part._panels.nbytes
        part.matrix = part._view(self.matrix.format)
        return part


def _product(x: Tensor, groups: Groups, bias: Tensor | None) -> Tensor:
    """Multiply `x` [rows, inputs] by torch's operators: [rows, outputs].

    The products of a group are whole numbers below 2^24, exact in float32 in any order; all else is done number by number.
    """
    weights, scale, minimum = groups
    size = weights.shape[2]
    numbers, x_scale = rounded_groups(x)
    floats = numbers.float()
    out = x.new_zeros(x.shape[0], weights.shape[0])
    for group in range(scale.shape[1]):
        whole, rest = divmod(group * size, GROUP)
        own = floats[:, whole, rest : rest + size]
        sums = (own @ weights[:, group].float().T).mul_(scale[:, group])
        if minimum is not None:
            sums += own.sum(1, keepdim=True) * minimum[:, group]
        out += sums.mul_(x_scale[:, whole, None])
    return out if bias is None else out.add_(bias)


# ---- formats: blocks [outputs, blocks, bytes], split into Groups


def _runs(x: Tensor, size: int) -> Tensor:
    """Split the last dimension of `x` into runs: [..., runs, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _half(two_bytes: Tensor) -> Tensor:
    """Return the float32 numbers of bytes of float16, [outputs, blocks, 2]: [outputs, blocks]."""
    return two_bytes.contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Return the low halves of `run` bytes, then their high halves, and so on: [outputs, blocks, twice the bytes]."""
    runs = _runs(packed, run)[..., None, :]
    return torch.cat((runs & 15, runs >> 4), 3).flatten(2)


def _bits(packed: Tensor, run: int, bits: int) -> Tensor:
    """Return the lowest `bits` of `run` bytes, then those above, and so on."""
    runs = _runs(packed, run)[..., None, :]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return ((runs >> shifts) & (1 << bits) - 1).flatten(2)


def _grouped(numbers: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Groups:
    """Join `numbers` [outputs, blocks, weights] and scales [outputs, blocks] or [outputs, blocks, groups]."""
    scale = scale.flatten(1)
    numbers = numbers.short().view(*scale.shape, -1)
    return Groups(numbers, scale, None if minimum is None else minimum.flatten(1))


def _q8_0(blocks: Tensor) -> Groups:
    return _grouped(blocks[..., 2:].view(torch.int8), _half(blocks[..., :2]))


def _q4_0(blocks: Tensor) -> Groups:
    return _grouped(_nibbles(blocks[..., 2:], 16).short() - 8, _half(blocks[..., :2]))


def _q4_1(blocks: Tensor) -> Groups:
    return _grouped(_nibbles(blocks[..., 4:], 16), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _five(high: Tensor, low: Tensor) -> Tensor:
    """Return numbers of 5 bits: the fifth of input i is bit i of `high`, in 4 bytes."""
    fifth = (high[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(low, 16) | fifth.flatten(2) << 4


def _q5_0(blocks: Tensor) -> Groups:
    return _grouped(_five(blocks[..., 2:6], blocks[..., 6:]).short() - 16, _half(blocks[..., :2]))


def _q5_1(blocks: Tensor) -> Groups:
    return _grouped(_five(blocks[..., 4:8], blocks[..., 8:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum, [outputs, blocks, 8], of Q4_K and Q5_K: 6 bits each in 12 bytes, times a float16 each."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), -1)
    minima = torch.cat((middle & 63, high >> 4 | (middle >> 2 & 48)), -1)
    return _half(blocks[..., :2])[..., None] * scales, -(_half(blocks[..., 2:4])[..., None] * minima)


def _q4_k(blocks: Tensor) -> Groups:
    return _grouped(_nibbles(blocks[..., 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    numbers = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 32, 1) << 4
    return _grouped(numbers, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    numbers = _nibbles(blocks[..., :128], 64) | _bits(blocks[..., 128:192], 32, 2) << 4
    return _grouped(numbers.short() - 32, _half(blocks[..., 208:])[..., None] * blocks[..., 192:208].view(torch.int8))


def _mxfp4(blocks: Tensor) -> Groups:
    """The scale is 2^(e - 128), half of what the format says, since the values are doubled."""
    power = blocks[..., 0].int()
    scale = torch.where(power < 2, 0x200000 << power, (power - 1) << 23).view(torch.float32)
    return _grouped(torch.tensor(MXFP4_VALUES)[_nibbles(blocks[..., 1:], 16).int()], scale)


def _asymmetric(blocks: Tensor) -> Groups:
    numbers = _nibbles(blocks[..., 5:], 16) if blocks.shape[2] == 21 else blocks[..., 5:]
    scale = blocks[..., :4].clone(memory_format=torch.contiguous_format).view(torch.float32)[..., 0]
    return _grouped(numbers.short() - blocks[..., 4:5], scale)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(32, 34, 8, _q8_0),
    "Q4_0": BlockFormat(32, 18, 4, _q4_0),
    "Q4_1": BlockFormat(32, 20, 4, _q4_1),
    "Q5_0": BlockFormat(32, 22, 5, _q5_0),
    "Q5_1": BlockFormat(32, 24, 5, _q5_1),
    "Q4_K": BlockFormat(256, 144, 4, _q4_k),
    "Q5_K": BlockFormat(256, 176, 5, _q5_k),
    "Q6_K": BlockFormat(256, 210, 6, _q6_k),
    "MXFP4": BlockFormat(32, 17, 4, _mxfp4),
    "A4": BlockFormat(32, 21, 4, _asymmetric),
    "A8": BlockFormat(32, 37, 8, _asymmetric),
}
