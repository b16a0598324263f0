"""Operations on rows between products, one pass over the rows each with the compiled kernels: see `native/passes.c`.

Measured on one core, one row of 768: a norm 4 us to torch's 30; 2,048 gated numbers 4 us to 9.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels import device_passes
from afterglow.kernels.built import Native, native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide `x` [..., size] by its root mean square and multiply by `weight` [size]: the same shape and dtype."""
    library = suited(x, weight)
    if library is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=torch.float32)
    norm = library.new("afterglow_norm *", (weight.data_ptr(), size, eps))
    library.lib.afterglow_rms_norm(
        norm, rows.data_ptr(), rows.stride(0), out.data_ptr(), len(rows), torch.get_num_threads(), library.width
    )
    return out


def gated_silu(x: Tensor) -> Tensor:
    """Multiply SiLU of the gates, the first half of `x` [rows, 2 * size], by the second half: [rows, size]."""
    library = suited(x)
    if library is None:
        if x.device.type == "cuda" and (fused := device_passes.gated_silu(x)) is not None:
            return fused
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)
    size = x.shape[-1] // 2
    out = torch.empty(len(x), size, dtype=torch.float32)
    library.lib.afterglow_gated_silu(
        x.data_ptr(), x.stride(0), out.data_ptr(), len(x), size, torch.get_num_threads(), library.width
    )
    return out


def gated_clamped(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Multiply gate * sigmoid(alpha * gate) of the gates, the first half of `x` [rows, 2 * size], by one more than the second half:
    [rows, size]. Gates are at most `limit`, the others at most of that magnitude."""
    library = suited(x)
    if library is None:
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return (gate * alpha).sigmoid_().mul_(gate).mul_(up.clamp(-limit, limit).add_(1))
    size = x.shape[-1] // 2
    out = torch.empty(len(x), size, dtype=torch.float32)
    library.lib.afterglow_gated_clamped(
        *(library.new("afterglow_clamp *", (alpha, limit)), x.data_ptr(), x.stride(0), out.data_ptr(), len(x), size),
        *(torch.get_num_threads(), library.width),
    )
    return out


def rounded(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Round each row of `x` [rows, size] to 8 bits: (numbers uint8 [rows, size], scale float32 [rows, 1]), so that `x` is about
    (numbers - (levels + 1)) * scale. The largest magnitude of a row becomes `levels`, at most 127."""
    library = suited(x)
    if library is None:
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(levels)
        # All are positive, so that cutting off the fraction rounds.
        return (x / scale).add_(levels + 1.5).to(torch.uint8), scale
    numbers = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), 1, dtype=torch.float32)
    rounding = {
        "x": x.data_ptr(),
        "stride": x.stride(0),
        "rows": x.shape[0],
        "size": x.shape[1],
        "levels": levels,
        "numbers": numbers.data_ptr(),
        "scales": scale.data_ptr(),
    }
    library.lib.afterglow_round(library.new("afterglow_rounding *", rounding), torch.get_num_threads(), library.width)
    return numbers, scale


def suited(*tensors: Tensor) -> Native | None:
    """Return the compiled kernels if they take such tensors: float32 on CPU, the last dimension in one run."""
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return None
    return native()
