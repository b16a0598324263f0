"""How much attention each row of a context gets: column sums of the attention weights (H2O)."""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.kernels.gate import Gate
from afterglow.kernels.paged_parts import suited

MAX_WEIGHTS = 2**19  # weights at a time: 2 MiB stay in a core's cache (1,500 rows: 22 ms; 56 ms with 16 MiB)
MAX_WEIGHTS_CUDA = 2**24

_gate = Gate("triton_column_sums")


def column_sums(q: Tensor, keys: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """Sum the causal attention weights of `q` [n, heads, head_dim] for each row, over all queries and heads. The queries are
    those of the last n rows of `keys` [rows, kv_heads, head_dim].

    `lse` [n, heads] comes from `attend` (float32, natural log). Returns float32 [rows], whose sum is n * heads. The weights
    are computed again, piece by piece: the fused operators do not return theirs. On CUDA a kernel of Triton's does so.
    """
    heads, head_dim = q.shape[1:]
    if q.device.type == "cuda" and suited(q.dtype, head_dim, 1) and q.dtype == keys.dtype:
        if q.stride(2) == keys.stride(2) == 1:
            kind = q.device, q.dtype, head_dim, heads, keys.shape[1]
            fused: Tensor | None = _gate.run(lambda kernels: kernels.column_sums(q, keys, lse, scale), *kind)
            if fused is not None:
                return fused
    return by_torch(q, keys, lse, scale)


def by_torch(q: Tensor, keys: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Do what `column_sums` does by torch's operators."""
    n, heads, head_dim = q.shape
    rows, kv_heads = keys.shape[:2]
    group = heads // kv_heads
    sums = torch.zeros(rows, dtype=torch.float32, device=q.device)
    most = MAX_WEIGHTS_CUDA if q.device.type == "cuda" else MAX_WEIGHTS
    step = max(1, most // (heads * max(rows, 1)))
    for first in range(0, n, step):
        stop = min(first + step, n)
        size, seen = stop - first, rows - n + stop  # the piece's last query sees so many rows
        folded = (
            q[first:stop].reshape(size, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        )
        weights = (folded @ keys[:seen].permute(1, 2, 0)).float().mul_(scale)
        weights = weights.view(kv_heads, group, size, seen)
        weights -= lse[first:stop].reshape(size, kv_heads, group).permute(1, 2, 0)[..., None]
        if size > 1:
            ahead = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            weights[..., seen - size :].masked_fill_(ahead, -torch.inf)
        sums[:seen] += weights.exp_().sum((0, 1, 2))
    return sums
