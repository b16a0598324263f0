"""A layer's MLP: one for all tokens, or a mixture of experts, of which each token takes a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.kernels.block import ExpertPanels, Pair, in_panels
from afterglow.kernels.device_experts import ExpertTables, Matrix, chosen_experts, expert_tables, usable_rows
from afterglow.kernels.device_products import RoundedMatrix
from afterglow.kernels.passes import gated_clamped, gated_silu
from afterglow.model.linear import Linear, PlainLinear
from afterglow.model.spec import Activation, ExpertsSpec

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

LANES = 16  # numbers of the widest vector register


@dataclass(frozen=True, slots=True)
class Mlp:
    """Two matrices and what is between them. `gated`: the first one has gates and, behind them, as many values. `clamp`: what
    `gated_clamped` takes instead of SiLU."""

    wide: Linear
    narrow: Linear
    activation: Activation
    gated: bool
    clamp: tuple[float, float] | None = None

    @property
    def panels(self) -> Pair | None:
        """Return the matrices if the compiled kernels have a layer with this MLP in one call."""
        return None if self.clamp is not None else _pair(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [rows, hidden] from `x` of the same shape."""
        inner = self.wide(x)
        if not self.gated:
            inner = ACTIVATIONS[self.activation](inner)
        elif self.clamp is not None:
            inner = gated_clamped(inner, *self.clamp)
        elif self.activation == "silu":
            inner = gated_silu(inner)
        else:
            gate, up = inner.chunk(2, -1)
            inner = ACTIVATIONS[self.activation](gate).mul_(up)
        return self.narrow(inner)


def _pair(mlp: Mlp) -> Pair | None:
    """Return the matrices of an MLP whose gates go through SiLU, or are clamped, if the compiled kernels multiply with them."""
    if not mlp.gated or mlp.activation != "silu" or not in_panels(mlp.wide) or not in_panels(mlp.narrow):
        return None
    return Pair(mlp.wide, mlp.narrow)


class Experts:
    """A mixture of experts. A pass reads the weights of those that its rows choose, and no others."""

    __slots__ = ("_router", "_shared", "_shared_gate", "_spec", "_tables", "experts")

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        experts: Sequence[Mlp],
        shared: Mlp | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        """Keep the weights. `router` yields a score for each expert, `shared_gate` one for the shared MLP; there are both or none of
        the last two."""
        self._spec, self._router, self.experts = spec, router, tuple(experts)
        self._shared, self._shared_gate = shared, shared_gate
        self._tables = _tables(self.experts)

    def static_rows(self, dtype: torch.dtype) -> int:
        """Return how many rows of `dtype` launch the same work whatever they choose, 0 for none. May wait for the device."""
        return 0 if self._tables is None else usable_rows(self._tables, dtype, self._spec.chosen)

    @property
    def panels(self) -> ExpertPanels | None:
        """Return the matrices if the compiled kernels have a layer with these experts in one call."""
        pairs = [pair for expert in self.experts if (pair := _pair(expert)) is not None]
        if len(pairs) < len(self.experts) or not in_panels(self._router):
            return None
        found = ExpertPanels(self._router, pairs, self._spec.chosen, self._spec.normed, clamp=self.experts[0].clamp)
        if self._shared is None:
            return found
        shared = _pair(self._shared)
        if shared is None or not in_panels(self._shared_gate):
            return None
        return found._replace(shared=shared, shared_gate=self._shared_gate)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [rows, hidden] from `x` of the same shape. Rows of one expert are one product."""
        weights, chosen = self._route(x)
        out = None if self._tables is None else chosen_experts(x, weights, chosen, self._tables)
        if out is None:
            out = self._by_groups(x, weights, chosen)
        if self._shared is not None and self._shared_gate is not None:
            out += _sigmoid(self._shared_gate(x)) * self._shared(x)
        return out

    def _by_groups(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute what the rows' experts do, expert by expert."""
        out = torch.zeros_like(x)
        if len(x) == 1:
            for expert, weight in sorted(zip(chosen[0].tolist(), weights[0].tolist(), strict=True)):
                out += self.experts[expert](x).mul_(weight)
            return out
        order = chosen.flatten().argsort(stable=True)
        rows, weights = order // self._spec.chosen, weights.flatten()[order, None]
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=self._spec.count).tolist()):
            if count:
                where = rows[start : start + count]
                part = self.experts[expert](x[where])
                out.index_add_(0, where, part.mul_(weights[start : start + count]))
                start += count
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, in the dtype of `x`, and numbers (int64) of the experts that each row takes, both [rows, chosen]."""
        weights, chosen = self._router(x).softmax(-1, dtype=torch.float32).topk(self._spec.chosen, -1)
        if self._spec.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen


def _tables(mlps: Sequence[Mlp]) -> ExpertTables | None:
    """Say where the weights of experts are, if kernels on the device can read them: with gates through SiLU, or clamped."""
    usable = [mlp for mlp in mlps if mlp.gated and mlp.activation == "silu"]
    wide = [matrix for mlp in usable if (matrix := _matrix(mlp.wide)) is not None]
    narrow = [matrix for mlp in usable if (matrix := _matrix(mlp.narrow)) is not None]
    if min(len(wide), len(narrow)) < len(mlps) or wide[0].numbers.device.type != "cuda":
        return None
    return expert_tables(wide, narrow, mlps[0].clamp)


def _matrix(linear: Linear) -> Matrix | None:
    if isinstance(linear, RoundedMatrix):
        return linear
    return linear.matrix if isinstance(linear, PlainLinear) else None


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid of `x` [rows, 1]. Torch rounds what fills no vector register in another way: each row fills some, so
    that it does not depend on the others.
    """
    return torch.sigmoid(x.expand(-1, LANES).contiguous())[:, :1]
