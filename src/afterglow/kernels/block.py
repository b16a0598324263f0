"""The part of a layer after attention, in one call of a compiled kernel: see `native/block.c`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from afterglow.kernels.built import Native, native
from afterglow.kernels.matrix import BytePanels, Panels
from afterglow.kernels.packed import PackedPanels

Panelled: TypeAlias = Panels | BytePanels | PackedPanels


def in_panels(matrix: object) -> TypeGuard[Panelled]:
    """Return whether the compiled kernels multiply with this matrix: a `Block` may have it."""
    return isinstance(matrix, Panelled) and matrix.matrix is not None


class Pair(NamedTuple):
    """The matrices of an MLP gated by SiLU: one that yields gates, then the numbers that they let through, and the one behind it."""

    wide: Panelled
    narrow: Panelled

    def check(self, hidden: int) -> None:
        """Raise ValueError unless they turn rows of `hidden` numbers into such."""
        if not self.wide.inputs == self.narrow.outputs == hidden or self.wide.outputs != 2 * self.narrow.inputs:
            raise ValueError(
                f"these matrices do not follow each other: {hidden} numbers, {self.wide.inputs} -> {self.wide.outputs}, "
                f"{self.narrow.inputs} -> {self.narrow.outputs}"
            )


class ExpertPanels(NamedTuple):
    """A mixture of experts. `router` yields a score for each of the `experts`, of which a row takes the `chosen` highest; `normed`: their
    weights add up to 1. `shared`: an MLP for all rows, weighed by the logistic function of what `shared_gate` yields. `clamp`: what
    `passes.gated_clamped` takes, None for SiLU."""

    router: Panelled
    experts: Sequence[Pair]
    chosen: int
    normed: bool
    shared: Pair | None = None
    shared_gate: Panelled | None = None
    clamp: tuple[float, float] | None = None

    def described(self, library: Native) -> tuple[Any, object]:
        """Return the experts as the compiled kernels read them, and what must stay in memory as long."""
        for pair in (*self.experts, *(() if self.shared is None else (self.shared,))):
            pair.check(self.router.inputs)
        sizes = {pair.wide.outputs for pair in self.experts}  # memory for intermediate results is that of the first
        gate = self.shared_gate
        if len(sizes) != 1 or not self.router.outputs == len(self.experts) >= self.chosen >= 1:
            raise ValueError(
                f"{self.chosen} of {len(self.experts)} experts of sizes {sizes} cannot be chosen by this router"
            )
        if gate is not None and (gate.inputs, gate.outputs) != (self.router.inputs, 1):
            raise ValueError(f"the gate of the shared MLP yields one number, not {gate.inputs} -> {gate.outputs}")
        matrices = library.new("afterglow_matrix[]", [m.matrix[0] for pair in self.experts for m in pair])
        about = {
            "router": self.router.matrix[0],
            "matrices": matrices,
            "count": len(self.experts),
            "chosen": self.chosen,
            "normed": self.normed,
            "clamp": self.clamp or (1.0, 0.0),
        }
        shared = None
        if self.shared is not None and self.shared_gate is not None:
            shared = library.new("afterglow_matrix[]", [m.matrix[0] for m in (*self.shared, self.shared_gate)])
            about["shared"] = shared
        return library.new("afterglow_experts *", about), (self, matrices, shared)


class Block:
    """Attention's output matrix, an RMS norm, an MLP or a mixture of experts, and the RMS norm after it. Float32 on CPU."""

    __slots__ = ("_library", "_memory", "_width", "hidden", "inputs", "layer")

    def __init__(
        self, out: Panelled, norm: tuple[Tensor, float], mlp: Pair | ExpertPanels, after: tuple[Tensor, float]
    ) -> None:
        """Keep the matrices. A norm is its weight [hidden] and the number that is added to the mean square. Needs the compiled
        kernels.

        Raises: ValueError if the shapes of the matrices do not follow each other.
        """
        library = native()
        assert library is not None, "there are no compiled kernels"
        self._library, self._width = library, library.width
        self.inputs, self.hidden = out.inputs, out.outputs
        weights = [weight.float().contiguous() for weight, _ in (norm, after)]
        before, behind = ((w.data_ptr(), self.hidden, eps) for w, (_, eps) in zip(weights, (norm, after), strict=True))
        about: dict[str, Any] = {"out": out.matrix[0], "before": before, "after": behind}
        experts: object = None
        if isinstance(mlp, Pair):
            mlp.check(self.hidden)
            about |= {"mlp_in": mlp.wide.matrix[0], "mlp_out": mlp.narrow.matrix[0]}
        else:
            if mlp.router.inputs != self.hidden:
                raise ValueError(f"experts of {mlp.router.inputs} numbers cannot follow {self.hidden}")
            about["experts"], experts = mlp.described(library)
        self._memory = weights, out, mlp, about, experts
        self.layer = library.new("afterglow_layer *", about)

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """Turn `x` [rows, hidden], contiguous, the input of the layer, into its output, given `attended` [rows, inputs].

        Returns the output after the second norm: [rows, hidden]. Raises: MemoryError.
        """
        rows = x.shape[0]
        if attended.stride(1) != 1:
            attended = attended.contiguous()
        assert x.is_contiguous()
        assert attended.shape == (rows, self.inputs)
        normed = torch.empty(rows, self.hidden, dtype=torch.float32)
        failed = self._library.lib.afterglow_finish_layer(
            *(self.layer, x.data_ptr(), attended.data_ptr(), attended.stride(0), normed.data_ptr(), rows),
            *(torch.get_num_threads(), self._width),
        )
        if failed:
            raise MemoryError(f"no memory for the intermediate results of {rows} rows in a layer")
        return normed
