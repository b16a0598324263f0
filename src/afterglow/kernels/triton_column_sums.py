"""How much attention each row of a context gets, without weights in memory: the scores are computed again, tile by tile."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.attention import attend
from afterglow.kernels.column_sums import by_torch
from afterglow.kernels.gate import agree
from afterglow.kernels.triton_attention import exact, lanes

ROWS, QUERIES = 64, 32  # of a tile


@triton.jit(do_not_specialize=["n", "rows"])
def _column_sums(
    q,
    keys,
    lse,
    sums,
    n,
    rows,
    scale,
    q_row,
    q_head,
    keys_row,
    keys_head,
    lse_row,
    lse_head,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    tile: tl.constexpr,
    many: tl.constexpr,
    kind: tl.constexpr,
):
    # One program for each tile of rows and head. It goes through all queries that see its rows, so nothing is added up twice.
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    head = tl.program_id(1)
    lane = tl.arange(0, lanes)
    inside = lane < head_dim
    at_keys = keys + row[:, None].to(tl.int64) * keys_row + (head // group) * keys_head + lane[None, :]
    seen = tl.load(at_keys, mask=(row < rows)[:, None] & inside[None, :], other=0.0).to(kind)
    first = tl.maximum(tl.program_id(0) * tile - (rows - n), 0) // many
    total = tl.zeros([tile], tl.float32)
    for block in range(first, tl.cdiv(n, many)):
        query = block * many + tl.arange(0, many)
        valid = query < n
        at_q = q + query[:, None].to(tl.int64) * q_row + head * q_head + lane[None, :]
        asking = tl.load(at_q, mask=valid[:, None] & inside[None, :], other=0.0).to(kind)
        base = tl.load(lse + query.to(tl.int64) * lse_row + head * lse_head, mask=valid, other=0.0)
        scores = tl.dot(asking, tl.trans(seen), input_precision="ieee") * scale - base[:, None]
        visible = valid[:, None] & (row[None, :] <= (query + (rows - n))[:, None])
        total += tl.sum(tl.where(visible, tl.exp(tl.where(visible, scores, 0.0)), 0.0), 0)
    tl.store(sums + head.to(tl.int64) * rows + row, total, mask=row < rows)


def column_sums(q: Tensor, keys: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Do what `kernels.column_sums` does. A head's dimensions lie side by side in `q` and `keys`."""
    n, heads, head_dim = q.shape
    rows, kv_heads = keys.shape[:2]
    sums = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    if n == 0 or rows == 0:
        return sums.zero_().sum(0)
    _column_sums[(triton.cdiv(rows, ROWS), heads)](
        *(q, keys, lse, sums, n, rows, scale, *q.stride()[:2], *keys.stride()[:2], *lse.stride()),
        group=heads // kv_heads,
        head_dim=head_dim,
        lanes=lanes(head_dim),
        tile=ROWS,
        many=16 if q.dtype == torch.float32 else QUERIES,
        kind=exact(q.dtype),
        num_warps=8 if q.dtype == torch.float32 else 4,
        num_stages=1 if q.dtype == torch.float32 else 2,
    )
    return sums.sum(0)


def trial(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    """Compare with torch's operators, on 20 queries and 90 rows. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    q, keys = draw(20, heads, head_dim), draw(90, kv_heads, head_dim)
    scale = head_dim**-0.5
    lse = attend(q, keys, keys, scale=scale, causal=True)[1]
    # Torch rounds scores to the dtype before it takes their exponentials; sums of some twenty weights.
    rounding = max(16 * torch.finfo(dtype).eps, 1e-4)
    agree("column sums", column_sums(q, keys, lse, scale), by_torch(q, keys, lse, scale), rounding)
