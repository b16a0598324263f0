"""The part of a layer after attention, in one call of a compiled kernel: see `native/block.c`."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from afterglow.kernels.built import native
from afterglow.kernels.matrix import BytePanels, Panels
from afterglow.kernels.packed import PackedPanels

Panelled: TypeAlias = Panels | BytePanels | PackedPanels


def in_panels(matrix: object) -> TypeGuard[Panelled]:
    """Return whether the compiled kernels multiply with this matrix: a `Block` may have it."""
    return isinstance(matrix, Panelled) and matrix.matrix is not None


class Block:
    """Attention's output matrix, an RMS norm, an MLP gated by SiLU, and the RMS norm after it. Float32 on CPU."""

    __slots__ = ("_layer", "_library", "_memory", "_width", "hidden", "inputs")

    def __init__(
        self,
        out: Panelled,
        norm: tuple[Tensor, float],
        mlp_in: Panelled,
        mlp_out: Panelled,
        after: tuple[Tensor, float],
    ) -> None:
        """Keep the matrices. A norm is its weight [hidden] and the number that is added to the mean square; `mlp_in` yields
        gates, then the numbers that they let through. Needs the compiled kernels.

        Raises: ValueError if the shapes of the matrices do not follow each other.
        """
        library = native()
        assert library is not None, "there are no compiled kernels"
        if not out.outputs == mlp_in.inputs == mlp_out.outputs or mlp_in.outputs != 2 * mlp_out.inputs:
            raise ValueError(
                f"these matrices do not follow each other: {out.inputs} -> {out.outputs}, {mlp_in.inputs} -> "
                f"{mlp_in.outputs}, {mlp_out.inputs} -> {mlp_out.outputs}"
            )
        self._library, self._width = library, library.width
        self.inputs, self.hidden = out.inputs, out.outputs
        weights = [weight.float().contiguous() for weight, _ in (norm, after)]
        norms = [(w.data_ptr(), self.hidden, eps) for w, (_, eps) in zip(weights, (norm, after), strict=True)]
        self._memory = weights, out, mlp_in, mlp_out
        self._layer = library.new("afterglow_layer *", (*(m.matrix[0] for m in (out, mlp_in, mlp_out)), *norms))

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """Turn `x` [rows, hidden], contiguous, the input of the layer, into its output, given `attended` [rows, inputs].

        Returns the output after the second norm: [rows, hidden]. Raises: MemoryError.
        """
        rows = x.shape[0]
        if attended.stride(1) != 1:
            attended = attended.contiguous()
        assert x.is_contiguous()
        assert attended.shape == (rows, self.inputs)
        normed = torch.empty(rows, self.hidden)
        failed = self._library.lib.afterglow_finish_layer(
            *(self._layer, x.data_ptr(), attended.data_ptr(), attended.stride(0), normed.data_ptr(), rows),
            *(torch.get_num_threads(), self._width),
        )
        if failed:
            raise MemoryError(f"no memory for the intermediate results of {rows} rows in a layer")
        return normed
