"""Experts that rows have chosen: two launches for all of them, whatever the rows have chosen."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.device_experts import ExpertTables, Matrix, PlainMatrix, Stack
from afterglow.kernels.device_products import Kind
from afterglow.kernels.gate import agree
from afterglow.kernels.passes import gated_clamped
from afterglow.kernels.triton_products import _halves, _parts, _weights, drawn

OUTPUTS = 16  # of a program
DEEP = 128  # numbers, or bytes of two numbers each, of an output that it reads at a time
PLAIN = Kind(0, 0, torch.float32)  # weights in the dtype of the rows


@triton.jit
def _sums(
    x,
    matrix,
    output,
    there,
    numbers,
    scale,
    offset,
    width,
    aligned: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    shift: tl.constexpr,
    less: tl.constexpr,
    coded: tl.constexpr,
    deep: tl.constexpr,
):
    # A row times the weights of some outputs, float32 [outputs]. `matrix`: its places. A weight is rounded to the row's dtype, as
    # torch's is.
    each: tl.constexpr = 2 if bits == 4 else 1  # numbers of an element
    dtype = x.dtype.element_ty
    at = output[:, None].to(tl.int64)
    begin = tl.load(matrix)
    if aligned:
        begin = tl.multiple_of(begin, 16)
    numbers += begin
    if bits:
        scale += tl.load(matrix + 1)
        offset += tl.load(matrix + 2)
    total = tl.zeros([output.shape[0], deep], tl.float32)
    if groups == 1:
        by, rest = _parts(scale, offset, at, there, 0, groups, 1, shift)
    for step in range(tl.cdiv(width, deep)):
        place = step * deep + tl.arange(0, deep)
        inside = place < width
        if groups > 1:
            # Inputs are a whole number of groups.
            some: tl.constexpr = deep * each // size
            by, rest = _parts(scale, offset, at, there, step * some, groups, some, shift)
        if bits == 4:
            packed = tl.load(numbers + at * width + place[None, :], mask=there & inside[None, :], other=0)
            low, high = _halves(packed, by, rest, less, shift, coded, dtype)
            own = place // 16 * 32 + place % 16
            total += low.to(tl.float32) * tl.load(x + own, mask=inside, other=0.0).to(tl.float32)[None, :]
            total += high.to(tl.float32) * tl.load(x + own + 16, mask=inside, other=0.0).to(tl.float32)[None, :]
        else:
            read = tl.load(numbers + at * width + place[None, :], mask=there & inside[None, :], other=0.0)
            weight = read.to(tl.float32)
            if bits == 8:
                weight = _weights(weight, by, rest, shift, size).to(dtype).to(tl.float32)
            total += weight * tl.load(x + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def _expert_wide(
    x,
    places,
    chosen,
    out,
    bias,
    numbers,
    scale,
    offset,
    width,
    taken,
    inner,
    x_row,
    alpha,
    limit,
    aligned: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    shift: tl.constexpr,
    less: tl.constexpr,
    coded: tl.constexpr,
    biased: tl.constexpr,
    clamped: tl.constexpr,
    many: tl.constexpr,
    deep: tl.constexpr,
):
    # One program for each expert of each row, and `many` outputs: a gate, and the value that it lets through.
    pair = tl.program_id(0).to(tl.int64)
    matrix = places + tl.load(chosen + pair) * 4
    both = tl.arange(0, 2 * many)
    own = tl.program_id(1) * many + both % many
    output = tl.where(both < many, own, own + inner)
    sums = _sums(
        x + pair // taken * x_row, matrix, output, (own < inner)[:, None], numbers, scale, offset, width,
        aligned, bits, groups, size, shift, less, coded, deep,
    )  # fmt: skip
    if biased:
        sums += tl.load(bias + tl.load(matrix + 3) + output, mask=own < inner, other=0.0).to(tl.float32)
    # Rounded where torch's operators round.
    dtype = x.dtype.element_ty
    gate, up = tl.split(tl.trans(tl.reshape(sums.to(dtype).to(tl.float32), [2, many])))
    if clamped:
        gate = tl.minimum(gate, limit)
        open = tl.sigmoid((gate * alpha).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        up = (tl.minimum(tl.maximum(up, -limit), limit) + 1).to(dtype).to(tl.float32)
        active = (open * gate).to(dtype).to(tl.float32)
    else:
        active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    output = tl.program_id(1) * many + tl.arange(0, many)
    tl.store(out + pair * inner + output, (active * up).to(dtype), mask=output < inner)


@triton.jit
def _expert_narrow(
    x,
    places,
    chosen,
    out,
    bias,
    numbers,
    scale,
    offset,
    width,
    weights,
    taken,
    hidden,
    inner,
    aligned: tl.constexpr,
    bits: tl.constexpr,
    groups: tl.constexpr,
    size: tl.constexpr,
    shift: tl.constexpr,
    less: tl.constexpr,
    coded: tl.constexpr,
    biased: tl.constexpr,
    many: tl.constexpr,
    deep: tl.constexpr,
):
    # One program for each row and `many` outputs: the sum over the row's experts, in their order.
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * many + tl.arange(0, many)
    dtype = x.dtype.element_ty
    total = tl.zeros([many], tl.float32)
    for slot in range(taken):
        pair = row * taken + slot
        matrix = places + tl.load(chosen + pair) * 4
        sums = _sums(
            x + pair * inner, matrix, output, (output < hidden)[:, None], numbers, scale, offset, width,
            aligned, bits, groups, size, shift, less, coded, deep,
        )  # fmt: skip
        if biased:
            sums += tl.load(bias + tl.load(matrix + 3) + output, mask=output < hidden, other=0.0).to(tl.float32)
        total += sums.to(dtype).to(tl.float32) * tl.load(weights + pair).to(tl.float32)
    tl.store(out + row * hidden + output, total.to(dtype), mask=output < hidden)


def chosen_experts(x: Tensor, weights: Tensor, chosen: Tensor, tables: ExpertTables) -> Tensor:
    """See `device_experts.chosen_experts`."""
    rows, taken = chosen.shape
    weights, chosen = weights.contiguous(), chosen.contiguous()
    hidden, inner = tables.hidden, tables.inner
    between = torch.empty((rows * taken, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    alpha, limit = tables.clamp or (0.0, 0.0)
    _expert_wide[(rows * taken, triton.cdiv(inner, OUTPUTS))](
        *(x, tables.wide.places, chosen, between, *_pointers(tables.wide), taken, inner, x.stride(0), alpha, limit),
        **_kept(tables.wide, x.dtype),
        clamped=tables.clamp is not None,
    )
    _expert_narrow[(rows, triton.cdiv(hidden, OUTPUTS))](
        *(between, tables.narrow.places, chosen, out, *_pointers(tables.narrow), weights, taken, hidden, inner),
        **_kept(tables.narrow, x.dtype),
    )
    return out


def _pointers(stack: Stack) -> tuple[Tensor | int, ...]:
    """Return a stack's bias, numbers, scales and offsets, numbers for those that are not there, and the elements of an output."""
    numbers, scale, offset, bias = stack.parts
    scale = numbers if scale is None else scale
    return numbers if bias is None else bias, numbers, scale, scale if offset is None else offset, numbers.shape[1]


def _kept(stack: Stack, dtype: torch.dtype) -> dict[str, Any]:
    """Return how the weights are kept, and sizes of a program for rows of `dtype`: as much as registers hold."""
    _, scale, _, bias = stack.parts
    kind = stack.kind or PLAIN
    return {
        "aligned": stack.aligned,
        "bits": kind.bits,
        "groups": 0 if scale is None else scale.shape[1],
        "size": kind.size,
        "shift": kind.shift,
        "less": kind.less,
        "coded": kind.coded,
        "biased": bias is not None,
        "many": OUTPUTS,
        "deep": DEEP if kind is PLAIN or dtype.itemsize == 2 else DEEP // 2,
        "num_warps": 4,
    }


def by_torch(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    wide: Sequence[Matrix],
    narrow: Sequence[Matrix],
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Compute the same row by row, by torch's operators."""
    out: Tensor = torch.zeros_like(x)
    for row, (own, numbers) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, expert in zip(own, numbers, strict=True):
            both = wide[expert].by_torch(x[row : row + 1])
            gate, up = both.chunk(2, -1)
            inner = F.silu(gate) * up if clamp is None else gated_clamped(both, *clamp)
            out[row] += narrow[expert].by_torch(inner)[0] * weight
    return out


def trial(
    device: torch.device,
    dtype: torch.dtype,
    wide: Kind | None,
    narrow: Kind | None,
    wide_biased: bool,
    narrow_biased: bool,
    clamp: tuple[float, float] | None,
) -> None:
    """Compare with torch's operators: sizes that fill no tile, two of three experts. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden, inner = 3, 200, 40
    if wide is not None or narrow is not None:
        hidden, inner = 224, 96  # whole groups

    def plain(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(device=device, dtype=dtype)

    def matrix(kind: Kind | None, outputs: int, inputs: int, biased: bool) -> Matrix:
        bias = plain(1, outputs)[0] if biased else None
        if kind is None:
            return PlainMatrix(plain(outputs, inputs), bias)
        return drawn(kind, outputs, inputs, generator, device).with_bias(bias)

    both = (
        [matrix(wide, 2 * inner, hidden, wide_biased) for _ in range(3)],
        [matrix(narrow, hidden, inner, narrow_biased) for _ in range(3)],
    )
    x, weights = plain(rows, hidden) * (1 if wide is not None else hidden**0.5), plain(rows, 2)
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1]]).to(device)
    # Sums of 240 products in another order; what is rounded between may be so the other way, and grows in the sums after it.
    tolerance = max(8 * torch.finfo(dtype).eps, (hidden + inner) ** 0.5 * torch.finfo(torch.float32).eps)
    found = chosen_experts(x, weights, chosen, ExpertTables(*both, clamp))
    agree("a mixture of experts", found, by_torch(x, weights, chosen, *both, clamp), tolerance)
