"""Passes over rows between products, one launch each: an addition with the norm behind it, and gates with what they let through."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.gate import agree

GATED = 1024  # numbers of a program


@triton.jit
def _add_rms_norm(x, part, weight, total, out, x_row, part_row, size, eps, lanes: tl.constexpr):
    # One program for each row.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    inside = lane < size
    a = tl.load(x + row * x_row + lane, mask=inside, other=0.0)
    b = tl.load(part + row * part_row + lane, mask=inside, other=0.0)
    # The sum is rounded before its norm is taken, as it is when these are two operators.
    added = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
    tl.store(total + row * size + lane, added, mask=inside)
    wide = added.to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + lane, (wide * by * w).to(a.dtype), mask=inside)


@triton.jit
def _gated_silu(x, out, x_row, size, lanes: tl.constexpr):
    # One program for each row and `lanes` numbers.
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * lanes + tl.arange(0, lanes)
    inside = lane < size
    gate = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + size + lane, mask=inside, other=0.0)
    # The activation is rounded before it is multiplied, as it is when these are two operators.
    active = (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32)
    tl.store(out + row * size + lane, (active * up.to(tl.float32)).to(up.dtype), mask=inside)


def add_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x + part`, both [rows, size], and the RMS norm of it, times `weight` [size]: two tensors of x's dtype. Sums and norms are
    computed in float32."""
    rows, size = x.shape
    total, out = (torch.empty((rows, size), dtype=x.dtype, device=x.device) for _ in range(2))
    lanes = triton.next_power_of_2(size)
    _add_rms_norm[(rows,)](
        *(x, part, weight, total, out, x.stride(0), part.stride(0), size, eps),
        lanes=lanes,
        num_warps=min(16, max(1, lanes // 512)),
    )
    return total, out


def gated_silu(x: Tensor) -> Tensor:
    """Multiply SiLU of the gates, the first half of `x` [rows, 2 * size], by the second half: [rows, size]. Computed in float32."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    _gated_silu[(rows, triton.cdiv(size, GATED))](x, out, x.stride(0), size, lanes=GATED, num_warps=4)
    return out


def trial(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Compare with torch's operators, on three rows of `size`. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4 * size, generator=generator).to(device=device, dtype=dtype)
    weight = torch.rand(size, generator=generator).to(device=device, dtype=dtype)
    # Either may round the other way, by one unit in the last place; twice, where a rounded number is rounded again. A device's square
    # roots and divisions of float32 are off by up to two more.
    rounding = (4 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    total, out = add_rms_norm(x[:, :size], x[:, size : 2 * size], weight, 1e-5)
    expected = x[:, :size] + x[:, size : 2 * size]
    agree("an addition", total, expected, rounding)
    agree("an RMS norm", out, F.rms_norm(expected, (size,), weight, 1e-5), rounding)
    gate, up = x[:, 2 * size :].chunk(2, -1)
    agree("gated SiLU", gated_silu(x[:, 2 * size :]), F.silu(gate) * up, rounding)
