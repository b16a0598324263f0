"""What a layer does to rows after attention, in one call where all of it has been built: see `native/block.c`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from afterglow.kernels.built import native
from afterglow.kernels.matrix import BytePanels, Panels


class _Matrix(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("panels", "more", "inputs", "outputs", "bytes")]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_int64), ("eps", ctypes.c_double)]


class _Block(ctypes.Structure):
    _fields_ = [(name, _Matrix) for name in ("out", "mlp_in", "mlp_out")] + [
        (name, _Norm) for name in ("before", "after")
    ]


class Block:
    """Attention's output matrix, an RMS norm, an MLP gated by SiLU, and the RMS norm after it. Float32 on CPU."""

    __slots__ = ("_address", "_held", "_library", "_width", "hidden", "inputs")

    def __init__(
        self,
        out: Panels | BytePanels,
        norm: tuple[Tensor, float],
        mlp_in: Panels | BytePanels,
        mlp_out: Panels | BytePanels,
        after: tuple[Tensor, float],
    ) -> None:
        """Norms are their weight [hidden] and what is added to the mean square; `mlp_in` yields gates, and then what they let
        through. Only where `native` is there."""
        library = native()
        assert library is not None, "asked for what has not been built"
        if not out.outputs == mlp_in.inputs == mlp_out.outputs or mlp_in.outputs != 2 * mlp_out.inputs:
            raise ValueError(
                f"these matrices do not follow each other: {out.inputs} -> {out.outputs}, {mlp_in.inputs} -> "
                f"{mlp_in.outputs}, {mlp_out.inputs} -> {mlp_out.outputs}"
            )
        self._library, self._width = library, library.afterglow_width_3()
        self.inputs, self.hidden = out.inputs, out.outputs
        weights = [weight.float().contiguous() for weight, _ in (norm, after)]
        block = _Block(
            *(_Matrix(*matrix.parts()) for matrix in (out, mlp_in, mlp_out)),
            *(_Norm(weight.data_ptr(), eps) for weight, (_, eps) in zip(weights, (norm, after), strict=True)),
        )
        self._held = block, weights, out, mlp_in, mlp_out
        self._address = ctypes.addressof(block)

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """`x` [rows, hidden], contiguous, what the layer began with, becomes what it ends with, given `attended` [rows, inputs].
        Returns that, normed: [rows, hidden]."""
        rows = x.shape[0]
        if attended.stride(1) != 1:
            attended = attended.contiguous()
        assert x.is_contiguous()
        assert attended.shape == (rows, self.inputs)
        normed = torch.empty(rows, self.hidden)
        failed = self._library.afterglow_block_3(
            *(self._address, x.data_ptr(), attended.data_ptr(), attended.stride(0), normed.data_ptr(), rows),
            *(torch.get_num_threads(), self._width),
        )
        if failed:
            raise MemoryError(f"no memory for what {rows} rows become on the way through a layer")
        return normed
