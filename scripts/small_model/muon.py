"""The optimizer of hidden matrices. `torch.optim.Muon` orthogonalises in bfloat16, matrix by matrix; this one in float32 and in
batches, which is faster on a CPU and is how the bundled model was trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Iterate towards the nearest orthogonal matrix (Newton-Schulz, batched)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = g.shape[-2] > g.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        xx = x @ x.mT
        x = a * x + (b * xx + c * (xx @ xx)) @ x
    out: Tensor = x.mT if tall else x
    return out


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for hidden matrices."""

    def __init__(
        self, params: Sequence[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters; matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    grad, state = p.grad, self.state[p]
                    assert grad is not None
                    if "m" not in state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].lerp_(grad, 1 - group["momentum"])
                    updates.append(grad.lerp(state["m"], group["momentum"]))
                scale = math.sqrt(max(1.0, shape[0] / shape[1]))
                for p, u in zip(params, orthogonalize(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(u, alpha=-group["lr"] * scale)
