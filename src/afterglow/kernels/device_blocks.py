"""Matrices in the blocks of a file on CUDA: numbers, scales and offsets of `packed`'s formats, as `RoundedMatrix` multiplies them.

Nothing is rounded again: widened weights are those of `packed.dequantize`, to the bit. Numbers of 4 bits keep 4, others get 8. Scales
and offsets are kept in 16 bits where that loses nothing. Those of Q4_K and Q5_K are products of two numbers, and those of Q6_K
too, so that they take 32. Floats of 8 bits are a format of their own, which a CPU does not multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.kernels.device_products import FLOAT8, ROUND_ROWS, RoundedMatrix
from afterglow.kernels.packed import BLOCK_FORMATS, GROUP, check, split

FLOATS = "float8"  # a format: a row is its scale, float32, and numbers in e4m3
NARROW = (torch.float16, torch.bfloat16)  # for scales; bfloat16 has all powers of two

# Bits of a weight on the device, its part of scales and offsets included. Of A4 and A8 at most: without zeros they take fewer.
DEVICE_BITS = {
    "Q8_0": 8.5,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q4_K": 6.0,
    "Q5_K": 10.0,
    "Q6_K": 10.0,
    "MXFP4": 4.5,
    "A4": 5.25,
    "A8": 9.25,
}


class _Parts(NamedTuple):
    numbers: Tensor  # as `RoundedMatrix` has them
    scale: Tensor  # float32 [outputs, groups]
    offset: Tensor | None  # float32 or int16, as scale


def device_matrix(
    blocks: Tensor, block_format: str, inputs: int, device: torch.device, bias: Tensor | None = None
) -> RoundedMatrix:
    """Copy `blocks`, uint8 [outputs, bytes of a row] on the CPU, the rows exactly as in a file; `bias` [outputs] on the device.

    Raises: ValueError if the format is unknown, or its rows of `inputs` weights have other sizes.
    """
    if block_format == FLOATS:
        row_bytes, width, dtype = 4 + inputs, inputs, FLOAT8
    else:
        check(blocks, block_format)
        row_bytes = BLOCK_FORMATS[block_format].row_bytes(inputs)
        narrow = BLOCK_FORMATS[block_format].bits == 4
        width, dtype = (inputs // 2, torch.uint8) if narrow else (inputs, torch.int8)
    if row_bytes != blocks.shape[1]:
        raise ValueError(f"a row of {blocks.shape[1]} bytes of {block_format} has not {inputs} inputs")
    numbers = torch.empty(blocks.shape[0], width, dtype=dtype, device=device)
    scales, offsets = [], []
    for at, parts in _pieces(blocks, block_format):
        numbers[at : at + ROUND_ROWS].copy_(parts.numbers)
        scales.append(parts.scale)
        if parts.offset is not None:
            offsets.append(parts.offset)
    scale = _narrowed(torch.cat(scales), block_format).to(device)
    offset = _narrowed(torch.cat(offsets), block_format) if offsets else None
    if offset is not None and not offset.is_floating_point() and not offset.any():
        offset = None  # a symmetric checkpoint
    where = None if offset is None else offset.to(device)
    return RoundedMatrix(numbers, scale, inputs, bias, offset=where, coded=block_format == "MXFP4")


def _pieces(blocks: Tensor, block_format: str) -> Iterator[tuple[int, _Parts]]:
    take = _asymmetric if block_format in ("A4", "A8") else _floats if block_format == FLOATS else _of_file
    for at in range(0, blocks.shape[0], ROUND_ROWS):
        yield at, take(blocks[at : at + ROUND_ROWS], block_format)


def _of_file(blocks: Tensor, block_format: str) -> _Parts:
    numbers, scale, minimum = split(blocks, block_format)
    about = BLOCK_FORMATS[block_format]
    if block_format == "MXFP4":  # numbers are what the codes stand for
        return _Parts(blocks.reshape(len(blocks), -1, about.num_bytes)[..., 1:].flatten(1), scale, None)
    if about.bits != 4:
        return _Parts(numbers.to(torch.int8).flatten(1), scale, minimum)
    numbers = (numbers if minimum is not None else numbers + 8).to(torch.uint8).view(len(blocks), -1, GROUP)
    halves = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
    return _Parts(halves.flatten(1), scale, minimum)


def _floats(blocks: Tensor, block_format: str) -> _Parts:
    scale, numbers = (part.contiguous() for part in (blocks[:, :4], blocks[:, 4:]))
    return _Parts(numbers.view(FLOAT8), scale.view(torch.float32), None)


def _asymmetric(blocks: Tensor, block_format: str) -> _Parts:
    """Split blocks of A4 or A8. Numbers and zeros become 8 or 128 less, so that a symmetric checkpoint's zeros are 0."""
    parts = blocks.reshape(len(blocks), -1, BLOCK_FORMATS[block_format].num_bytes)
    scale = parts[..., :4].contiguous().view(torch.float32)[..., 0]
    zero, numbers = parts[..., 4].short(), parts[..., 5:].flatten(1)
    if block_format == "A4":
        return _Parts(numbers, scale, zero - 8)
    return _Parts((numbers ^ 128).view(torch.int8), scale, zero - 128)


def _narrowed(x: Tensor, block_format: str) -> Tensor:
    """Return scales or offsets in the fewest bits that hold them. Where that would differ from matrix to matrix by chance, though they are few
    or powers of two, in those that hold all: a layer's experts are to be alike."""
    if block_format == FLOATS:
        return x
    if block_format == "MXFP4":
        return x.bfloat16()
    if not x.is_floating_point():
        small = x.to(torch.int8)
        return small if torch.equal(small.short(), x) else x
    found = (x.to(dtype) for dtype in NARROW)
    return next((each for each in found if torch.equal(each.float(), x)), x).contiguous()
