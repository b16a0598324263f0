"""Sum up the attention that each row of a prefix gets from the new tokens, head by head (H2O's metric).

`kernels.column_sums` needs attention that was computed before. Here rows are to be selected first: there are no values yet,
and often only the keys of a few heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.kernels.passes import suited

MAX_WEIGHTS = 2**20  # at a time: 4 MiB
MAX_WEIGHTS_CUDA = 2**24
LANES = 4  # head_dim must be a multiple for the compiled kernels
MAX_QUERIES = 64  # at a time, rather than several heads: so the keys of a head are read once for all queries


def head_sums(q: Tensor, keys: Tensor, own_keys: Tensor, *, scale: float, extra_lse: Tensor | None = None) -> Tensor:
    """Sum the columns of the attention weights over the new tokens: float32 [heads, rows].

    `q` [n, heads, head_dim]; `keys` [rows, kv_heads, head_dim]; `own_keys` [n or more, kv_heads, head_dim]: keys of new tokens,
    the last n belong to `q`. Positions are applied. Query head h reads KV head h // (heads / kv_heads).

    A new token sees all rows and the new tokens up to itself; the softmax is over both, in float32. `extra_lse` [n, heads]
    (float32, natural log): the log-sum-exp of another segment that the tokens attend to, as `attend` returns it (a system
    prompt); that segment takes its share of the weights. No more than `MAX_WEIGHTS` weights exist at a time (except
    that one query and one KV head are not divided). Sums that are not numbers become 0.
    """
    n, heads, _ = q.shape
    rows, kv_heads = keys.shape[:2]
    group = heads // kv_heads
    sums = torch.zeros(heads, rows, dtype=torch.float32, device=q.device)
    if rows == 0 or n == 0:
        return sums
    new = len(own_keys)
    most = MAX_WEIGHTS_CUDA if q.device.type == "cuda" else MAX_WEIGHTS
    step = max(1, min(n, MAX_QUERIES, most // (group * (rows + new))))
    at_once = max(1, most // (group * (rows + new) * step))
    for kv in range(0, kv_heads, at_once):
        of_kv = slice(kv, kv + at_once)
        of_q = slice(kv * group, (kv + at_once) * group)
        past, own = keys[:, of_kv].permute(1, 2, 0), own_keys[:, of_kv].permute(1, 2, 0)
        for first in range(0, n, step):
            piece = slice(first, min(first + step, n))
            extra = None if extra_lse is None else extra_lse[piece, of_q]
            sums[of_q] += _piece(q[piece, of_q], past, own[..., : new - n + piece.stop], scale, extra)
    return sums.nan_to_num_(nan=0.0)


def group_sums(q: Tensor, keys: Tensor, own_keys: Tensor, *, scale: float, extra_lse: Tensor | None = None) -> Tensor:
    """Compute `head_sums` as means over each KV head's query heads: float32 [kv_heads, rows].

    The compiled kernels do that in one call: 64 queries of 2 heads each over 5,000 rows of 3 KV heads take 1.3 ms with two
    threads, 5.1 without the kernels.
    """
    library = suited(q, keys, own_keys) if len(q) and len(keys) and q.shape[2] % LANES == 0 else None
    if library is None:
        return grouped(head_sums(q, keys, own_keys, scale=scale, extra_lse=extra_lse), keys.shape[1])
    (n, heads, head_dim), (rows, kv_heads) = q.shape, keys.shape[:2]
    if q.stride(1) != head_dim:
        q = q.contiguous()
    extra = None if extra_lse is None else extra_lse.float().contiguous()
    sums = torch.empty(kv_heads, rows)
    columns = {
        "queries": q.data_ptr(),
        "query_stride": q.stride(0),
        "count": n,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "past": (keys.data_ptr(), keys.stride(0), keys.stride(1)),
        "past_rows": rows,
        "own": (own_keys.data_ptr(), own_keys.stride(0), own_keys.stride(1)),
        "own_rows": len(own_keys),
        "other_lse": 0 if extra is None else extra.data_ptr(),
        "scale": scale,
        "sums": sums.data_ptr(),
    }
    job = library.new("afterglow_columns *", columns)
    if library.lib.afterglow_column_sums(job, torch.get_num_threads(), library.width):
        raise MemoryError(f"no memory to sum up the attention of {n} queries to {rows} rows")
    return sums.div_(heads // kv_heads).nan_to_num_(nan=0.0)


def grouped(sums: Tensor, kv_heads: int) -> Tensor:
    """Average sums of query heads [heads, rows] over the group of each KV head: [kv_heads, rows]."""
    return sums.view(kv_heads, len(sums) // kv_heads, sums.shape[-1]).mean(1)


def _piece(q: Tensor, past: Tensor, own: Tensor, scale: float, extra: Tensor | None) -> Tensor:
    """Sum the columns for some queries and KV heads: float32 [heads, rows].

    `q` [size, heads, head_dim]; `past` [kv_heads, head_dim, rows]; `own` [kv_heads, head_dim, new]: the last `size` columns
    belong to `q`; `extra` [size, heads].
    """
    size, heads, head_dim = q.shape
    kv_heads, _, rows = past.shape
    group = heads // kv_heads
    folded = q.view(size, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    weights = (folded @ past).float().mul_(scale).view(kv_heads, group, size, rows)
    new = (folded @ own).float().mul_(scale).view(kv_heads, group, size, -1)
    if size > 1:
        ahead = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        new[..., -size:].masked_fill_(ahead, -torch.inf)
    peak = torch.maximum(weights.amax(-1), new.amax(-1))
    if extra is not None:
        extra = extra.view(size, kv_heads, group).permute(1, 2, 0)
        peak = torch.maximum(peak, extra)
    weights.sub_(peak[..., None]).exp_()
    total = weights.sum(-1) + new.sub_(peak[..., None]).exp_().sum(-1)
    if extra is not None:
        total += (extra - peak).exp_()
    return (total.reciprocal_()[..., None, :] @ weights).view(heads, rows)
