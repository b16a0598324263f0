"""Experts that rows have chosen: two launches for all of them, whatever the rows have chosen."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.device_experts import ExpertTables
from afterglow.kernels.gate import agree

OUTPUTS = 16  # of a program
INPUTS = 128  # that it multiplies at a time


@triton.jit
def _expert_wide(x, base, places, chosen, out, taken, hidden, inner, x_row, many: tl.constexpr, deep: tl.constexpr):
    # One program for each expert of each row, and `many` outputs: SiLU of a gate, times a value. Sums are float32.
    pair = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * many + tl.arange(0, many)
    there = (output < inner)[:, None]
    own = base + tl.load(places + tl.load(chosen + pair)) + output[:, None].to(tl.int64) * hidden
    values = own + inner * hidden
    gate = tl.zeros([many, deep], tl.float32)
    up = tl.zeros([many, deep], tl.float32)
    for step in range(tl.cdiv(hidden, deep)):
        place = step * deep + tl.arange(0, deep)
        inside = (place < hidden)[None, :]
        row = tl.load(x + pair // taken * x_row + place, mask=place < hidden, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(own + place[None, :], mask=there & inside, other=0.0).to(tl.float32) * row
        up += tl.load(values + place[None, :], mask=there & inside, other=0.0).to(tl.float32) * row
    dtype = x.dtype.element_ty
    # Rounded where torch's operators round.
    gates = tl.sum(gate, 1).to(dtype).to(tl.float32)
    active = (gates * tl.sigmoid(gates)).to(dtype).to(tl.float32)
    found = active * tl.sum(up, 1).to(dtype).to(tl.float32)
    tl.store(out + pair * inner + output, found.to(dtype), mask=output < inner)


@triton.jit
def _expert_narrow(x, base, places, chosen, weights, out, taken, hidden, inner, many: tl.constexpr, deep: tl.constexpr):
    # One program for each row and `many` outputs: the sum over the row's experts, in their order.
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * many + tl.arange(0, many)
    there = (output < hidden)[:, None]
    dtype = x.dtype.element_ty
    total = tl.zeros([many], tl.float32)
    for slot in range(taken):
        pair = row * taken + slot
        own = base + tl.load(places + tl.load(chosen + pair)) + output[:, None].to(tl.int64) * inner
        part = tl.zeros([many, deep], tl.float32)
        for step in range(tl.cdiv(inner, deep)):
            place = step * deep + tl.arange(0, deep)
            numbers = tl.load(x + pair * inner + place, mask=place < inner, other=0.0).to(tl.float32)[None, :]
            part += (
                tl.load(own + place[None, :], mask=there & (place < inner)[None, :], other=0.0).to(tl.float32) * numbers
            )
        weight = tl.load(weights + pair).to(tl.float32)
        total += tl.sum(part, 1).to(dtype).to(tl.float32) * weight
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
    sizes = {"many": OUTPUTS, "deep": INPUTS, "num_warps": 4}
    _expert_wide[(rows * taken, triton.cdiv(inner, OUTPUTS))](
        x, tables.base, tables.wide, chosen, between, taken, hidden, inner, x.stride(0), **sizes
    )
    _expert_narrow[(rows, triton.cdiv(hidden, OUTPUTS))](
        between, tables.base, tables.narrow, chosen, weights, out, taken, hidden, inner, **sizes
    )
    return out


def by_torch(x: Tensor, weights: Tensor, chosen: Tensor, wide: list[Tensor], narrow: list[Tensor]) -> Tensor:
    """Compute the same row by row, by torch's operators."""
    out: Tensor = torch.zeros_like(x)
    for row, (own, numbers) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, expert in zip(own, numbers, strict=True):
            gate, up = (wide[expert] @ x[row]).chunk(2)
            out[row] += (narrow[expert] @ (F.silu(gate) * up)) * weight
    return out


def trial(device: torch.device, dtype: torch.dtype) -> None:
    """Compare with torch's operators: sizes that fill no tile, two of three experts. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)
    rows, hidden, inner = 3, 200, 40

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(device=device, dtype=dtype)

    wide, narrow = [drawn(2 * inner, hidden) for _ in range(3)], [drawn(hidden, inner) for _ in range(3)]
    x, weights = drawn(rows, hidden) * hidden**0.5, drawn(rows, 2)
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1]]).to(device)
    # Sums of 240 products in another order; what is rounded between may be so the other way, and grows in the sums after it.
    tolerance = max(8 * torch.finfo(dtype).eps, 240**0.5 * torch.finfo(torch.float32).eps)
    found = chosen_experts(x, weights, chosen, ExpertTables(wide, narrow))
    agree("a mixture of experts", found, by_torch(x, weights, chosen, wide, narrow), tolerance)
