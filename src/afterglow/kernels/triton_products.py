"""Products of a few rows with weights in 8 or 4 bits: weights are widened where they are multiplied, and leave memory narrow."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.device_products import RoundedMatrix, rounded_rows
from afterglow.kernels.gate import agree
from afterglow.kernels.triton_attention import exact

OUTPUTS = 32  # of a tile


def tiles(dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """Return how many rows a tile may have, ascending, and its inputs: as many as registers hold. In float32 there are no tensor
    cores."""
    return ((16,), 32) if dtype == torch.float32 else ((16, 64), 128)


@triton.jit
def _scaled(x, by, group: tl.constexpr):
    # Numbers [outputs, inputs] times scales [outputs, groups], each for `group` inputs; a single one is for all.
    if by.shape[1] == 1:
        scaled = x * by
    else:
        wide = by[:, :, None] + tl.zeros([1, 1, group], tl.float32)
        scaled = x * tl.reshape(wide, [x.shape[0], x.shape[1]])
    return scaled


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    numbers,
    scale,
    bias,
    out,
    rows,
    outputs,
    inputs,
    x_row,
    bits: tl.constexpr,
    groups: tl.constexpr,
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
        by = tl.load(scale + at_output, mask=there, other=0.0).to(tl.float32)
    for step in range(tl.cdiv(inputs, deep)):
        if groups > 1:
            # Inputs are a whole number of groups of 32.
            group = step * (deep // 32) + tl.arange(0, deep // 32)
            known = there & (group < groups)[None, :]
            by = tl.load(scale + at_output * groups + group[None, :], mask=known, other=0.0).to(tl.float32)
        if bits == 4:
            # A group is 16 bytes: its inputs' first half in the low bits, the other in the high ones.
            place = step * (deep // 2) + tl.arange(0, deep // 2)
            inside = (place < inputs // 2)[None, :]
            packed = tl.load(numbers + at_output * (inputs // 2) + place[None, :], mask=there & inside, other=0)
            low = _scaled((packed & 15).to(tl.float32) - 8, by, 16).to(dtype).to(kind)
            high = _scaled((packed >> 4).to(tl.float32) - 8, by, 16).to(dtype).to(kind)
            own = (place // 16 * 32 + place % 16)[None, :]
            first = tl.load(at_x + own, mask=asked & inside, other=0.0).to(kind)
            second = tl.load(at_x + own + 16, mask=asked & inside, other=0.0).to(kind)
            total = tl.dot(first, tl.trans(low), total, input_precision="ieee")
            total = tl.dot(second, tl.trans(high), total, input_precision="ieee")
        else:
            place = step * deep + tl.arange(0, deep)
            inside = (place < inputs)[None, :]
            read = tl.load(numbers + at_output * inputs + place[None, :], mask=there & inside, other=0).to(tl.float32)
            weight = _scaled(read, by, 32).to(dtype).to(kind)
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
    sizes, deep = tiles(x.dtype)
    some = next((size for size in sizes if count <= size), sizes[-1])
    _multiply[(triton.cdiv(count, some), triton.cdiv(matrix.outputs, OUTPUTS))](
        *(x, matrix.numbers, matrix.scale, x if matrix.bias is None else matrix.bias, out),
        *(count, matrix.outputs, inputs, x.stride(0)),
        bits=matrix.bits,
        groups=matrix.scale.shape[1],
        biased=matrix.bias is not None,
        some=some,
        many=OUTPUTS,
        deep=deep,
        kind=exact(x.dtype),
        num_warps=4,
        num_stages=2 if x.dtype == torch.float32 else 4,
    )
    return out


def trial(device: torch.device, dtype: torch.dtype, bits: int, grouped: bool) -> None:
    """Compare with torch's products of the widened weights, for one row and many. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 352, generator=generator)
    numbers, scale = rounded_rows(weight, bits, grouped)
    bias = torch.randn(70, generator=generator).to(device=device, dtype=dtype)
    matrix = RoundedMatrix(numbers.to(device), scale.to(device), 352, bias)
    for rows in (1, 70):
        x = torch.randn(rows, 352, generator=generator).to(device=device, dtype=dtype)
        # Sums of 352 products in another order, rounded once; torch may add up a part in the dtype.
        agree("a product of rounded weights", multiply(x, matrix), matrix.by_torch(x), 4 * torch.finfo(dtype).eps)
