"""What happens to rows between products, in one pass over them each where that has been built: see `native/passes.c`.

Measured on one core, one row of 768: a norm 4 us to torch's 30; 2,048 gated numbers 4 us to 9.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.built import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., size] over its root mean square, times `weight` [size] -> the same shape and dtype."""
    library = suited(x, weight)
    if library is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape)
    library.afterglow_rms_norm_3(
        *(rows.data_ptr(), rows.stride(0), weight.data_ptr(), eps, out.data_ptr(), len(rows), size),
        *(torch.get_num_threads(), library.afterglow_width_3()),
    )
    return out


def gated_silu(x: Tensor) -> Tensor:
    """`x` [rows, 2 * size], gates and then what they let through -> [rows, size]."""
    library = suited(x)
    if library is None:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)
    size = x.shape[-1] // 2
    out = torch.empty(len(x), size)
    library.afterglow_gated_silu_3(
        *(x.data_ptr(), x.stride(0), out.data_ptr(), len(x), size),
        *(torch.get_num_threads(), library.afterglow_width_3()),
    )
    return out


def rounded(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Each row of `x` [rows, size] in 8 bits: (numbers uint8 [rows, size], scale float32 [rows, 1]), so that `x` is about
    (numbers - (levels + 1)) * scale; `levels` is what the largest magnitude of a row becomes, at most 127."""
    library = suited(x)
    if library is None:
        scale = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(levels)
        # All are positive, so that cutting off what follows the point rounds.
        return (x / scale).add_(levels + 1.5).to(torch.uint8), scale
    numbers = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), 1)
    library.afterglow_round_3(
        *(x.data_ptr(), x.stride(0), levels, numbers.data_ptr(), scale.data_ptr(), *x.shape),
        *(torch.get_num_threads(), library.afterglow_width_3()),
    )
    return numbers, scale


def suited(*tensors: Tensor) -> ctypes.CDLL | None:
    """What has been built, if it knows such tensors: float32 on CPU, the last dimension in one run."""
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return None
    return native()
