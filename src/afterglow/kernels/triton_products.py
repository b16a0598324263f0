"""Products of a few rows with weights in 8 or 4 bits: weights are widened where they are multiplied, and leave memory narrow."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.device_products import FLOAT8, Kind, RoundedMatrix
from afterglow.kernels.gate import agree
from afterglow.kernels.triton_attention import exact

OUTPUTS = 32  # of a tile


def tiles(dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Return how many rows a tile may have, ascending, and its inputs: as many as registers hold. In float32 there are no tensor
    cores."""
    return ((16,), 32) if dtype == torch.float32 else ((16, 64), 128)


@triton.jit
def _spread(by, like, group: tl.constexpr):
    # Numbers [outputs, groups], each for `group` inputs, as [outputs, inputs]; a single one is for all.
    if by.shape[1] == 1:
        spread = by
    else:
        wide = by[:, :, None] + tl.zeros([1, 1, group], tl.float32)
        spread = tl.reshape(wide, [like.shape[0], like.shape[1]])
    return spread


@triton.jit
def _weights(x, by, rest, offset: tl.constexpr, group: tl.constexpr):
    # What numbers stand for. Products of GGUF's numbers and scales are exact in float32, also where a sum follows at once.
    if offset == 1:
        x = x - _spread(rest, x, group)
    x = x * _spread(by, x, group)
    if offset == 2:
        x = x + _spread(rest, x, group)
    return x


@triton.jit
def _floats(codes, less: tl.constexpr, coded: tl.constexpr):
    # Numbers of 4 bits. `coded`: floats of 4 bits (MXFP4), doubled: 0, 1, 2, 3, 4, 6, 8, 12 and a sign.
    if coded:
        size = (codes & 7).to(tl.int32)
        power = tl.maximum(size >> 1, 1) - 1
        found = tl.where(size < 2, size, (2 + (size & 1)) << power)
        floats = tl.where(codes > 7, -found, found).to(tl.float32)
    else:
        floats = codes.to(tl.float32) - less
    return floats


@triton.jit
def _halves(packed, by, rest, less: tl.constexpr, shift: tl.constexpr, coded: tl.constexpr, dtype: tl.constexpr):
    # What the low and the high bits of bytes stand for: of a group's 16 bytes, its inputs' first half and the other one.
    low = _weights(_floats(packed & 15, less, coded), by, rest, shift, 16)
    high = _weights(_floats(packed >> 4, less, coded), by, rest, shift, 16)
    return low.to(dtype), high.to(dtype)


@triton.jit
def _parts(scale, offset, output, there, first, groups: tl.constexpr, some: tl.constexpr, shift: tl.constexpr):
    # Scales and offsets of `some` groups from `first` on, float32 [outputs, some]. Without offsets the second is any.
    group = (first + tl.arange(0, some))[None, :]
    known = there & (group < groups)
    at = output * groups + group
    by = tl.load(scale + at, mask=known, other=0.0).to(tl.float32)
    rest = by
    if shift:
        rest = tl.load(offset + at, mask=known, other=0).to(tl.float32)
    return by, rest


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    numbers,
    scale,
    offset,
    bias,
    out,
    rows,
    outputs,
    inputs,
    x_row,
    bits: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    shift: tl.constexpr,
    less: tl.constexpr,
    coded: tl.constexpr,
    biased: tl.constexpr,
    some: tl.constexpr,
    many: tl.constexpr,
    deep: tl.constexpr,
    kind: tl.constexpr,
):
    # One program for each tile of rows and of outputs. Sums are float32; a weight is rounded to the rows' dtype, as torch's is.
    row = tl.program_id(0) * some + tl.arange(0, some)
    output = tl.program_id(1) * many + tl.arange(0, many)
    there = (output < outputs)[:, None]
    asked = (row < rows)[:, None]
    at_x = x + row[:, None].to(tl.int64) * x_row
    at_output = output[:, None].to(tl.int64)
    dtype = x.dtype.element_ty
    total = tl.zeros([some, many], tl.float32)
    if groups == 1:
        by, rest = _parts(scale, offset, at_output, there, 0, groups, 1, shift)
    for step in range(tl.cdiv(inputs, deep)):
        if groups > 1:
            # Inputs are a whole number of groups.
            by, rest = _parts(scale, offset, at_output, there, step * (deep // size), groups, deep // size, shift)
        if bits == 4:
            place = step * (deep // 2) + tl.arange(0, deep // 2)
            inside = (place < inputs // 2)[None, :]
            packed = tl.load(numbers + at_output * (inputs // 2) + place[None, :], mask=there & inside, other=0)
            low, high = _halves(packed, by, rest, less, shift, coded, dtype)
            own = (place // 16 * 32 + place % 16)[None, :]
            first = tl.load(at_x + own, mask=asked & inside, other=0.0).to(kind)
            second = tl.load(at_x + own + 16, mask=asked & inside, other=0.0).to(kind)
            total = tl.dot(first, tl.trans(low.to(kind)), total, input_precision="ieee")
            total = tl.dot(second, tl.trans(high.to(kind)), total, input_precision="ieee")
        else:
            place = step * deep + tl.arange(0, deep)
            inside = (place < inputs)[None, :]
            read = tl.load(numbers + at_output * inputs + place[None, :], mask=there & inside, other=0.0).to(tl.float32)
            weight = _weights(read, by, rest, shift, size).to(dtype).to(kind)
            own_x = tl.load(at_x + place[None, :], mask=asked & inside, other=0.0).to(kind)
            total = tl.dot(own_x, tl.trans(weight), total, input_precision="ieee")
    if biased:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(to, total.to(dtype), mask=asked & (output < outputs)[None, :])


def multiply(x: Tensor, matrix: RoundedMatrix) -> Tensor:
    """Multiply `x` [rows, inputs], whose numbers lie side by side, by the matrix: [rows, outputs] of x's dtype."""
    count, inputs = x.shape
    out = torch.empty((count, matrix.outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    kept = matrix.kind
    sizes, deep = tiles(x.dtype)
    some = next((size for size in sizes if count <= size), sizes[-1])
    _multiply[(triton.cdiv(count, some), triton.cdiv(matrix.outputs, OUTPUTS))](
        *(x, matrix.numbers, matrix.scale, matrix.scale if matrix.offset is None else matrix.offset),
        *(x if matrix.bias is None else matrix.bias, out),
        *(count, matrix.outputs, inputs, x.stride(0)),
        bits=kept.bits,
        groups=matrix.scale.shape[1],
        size=kept.size,
        shift=kept.shift,
        less=kept.less,
        coded=kept.coded,
        biased=matrix.bias is not None,
        some=some,
        many=OUTPUTS,
        deep=deep,
        kind=exact(x.dtype),
        num_warps=4,
        num_stages=2 if x.dtype == torch.float32 else 4,
    )
    return out


def trial(device: torch.device, dtype: torch.dtype, kind: Kind) -> None:
    """Compare with torch's products of the widened weights, for one row and many. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)
    matrix = drawn(kind, 70, 352, generator, device)
    matrix = matrix.with_bias(torch.randn(70, generator=generator).to(device=device, dtype=dtype))
    # Sums of 352 products in another order, whose roundings grow with the square root, rounded once; torch may add up a part in
    # the dtype.
    tolerance = max(4 * torch.finfo(dtype).eps, 352**0.5 * torch.finfo(torch.float32).eps)
    for rows in (1, 70):
        x = torch.randn(rows, 352, generator=generator).to(device=device, dtype=dtype)
        agree("a product of rounded weights", multiply(x, matrix), matrix.by_torch(x), tolerance)


def drawn(kind: Kind, outputs: int, inputs: int, generator: torch.Generator, device: torch.device) -> RoundedMatrix:
    """Draw a matrix that is kept so, with weights of about 1."""
    four = kind.bits == 4
    width, least, most = (inputs // 2, 0, 256) if four else (inputs, -127, 128)
    numbers = torch.randint(least, most, (outputs, width), generator=generator)
    numbers = numbers.to(torch.uint8 if four else FLOAT8 if kind.coded else torch.int8)
    groups = inputs // kind.group if kind.group else 1
    scale = (torch.rand(outputs, groups, generator=generator) + 0.5) / (8 if four else 100)
    offset = None
    if kind.offset is not None:
        drawn_by = torch.randn(outputs, groups, generator=generator)
        # Floats of 4 bits begin with a minimum: numbers are not negative.
        offset = drawn_by / 4 - 7.5 * four * scale if kind.offset.is_floating_point else drawn_by.mul(2).round()
        offset = offset.to(kind.offset).to(device)
    where = numbers.to(device), scale.to(kind.scale).to(device)
    return RoundedMatrix(*where, inputs, offset=offset, coded=kind.coded)
