"""Passes over rows between products on CUDA, by kernels of Triton's behind their gate; None where torch must do them."""

from __future__ import annotations

from torch import Tensor

from afterglow.kernels.gate import Gate

MOST = 16384  # numbers of a row that is normed: one program holds them

_gate = Gate("triton_passes")


def add_rms_norm(x: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Return `x + part`, both [rows, size], and the RMS norm of it times `weight` [size]."""
    size = x.shape[1]
    if size > MOST or not x.is_floating_point() or {x.dtype} != {part.dtype, weight.dtype}:
        return None
    if x.stride(1) != 1 or part.stride(1) != 1 or weight.stride() != (1,):
        return None
    return _gate.run(lambda kernels: kernels.add_rms_norm(x, part, weight, eps), x.device, x.dtype, size)


def gated_silu(x: Tensor) -> Tensor | None:
    """Multiply SiLU of the first half of `x` [rows, 2 * size] by the second half."""
    size = x.shape[1] // 2
    if x.stride(1) != 1 or not x.is_floating_point():
        return None
    return _gate.run(lambda kernels: kernels.gated_silu(x), x.device, x.dtype, min(size, MOST))
