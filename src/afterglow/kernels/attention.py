"""Exact attention over one segment, and the merge of several: out and log-sum-exp.

Every LSE here is float32, natural logarithm, of the scaled scores (RelayAttention's algorithm 1; libraries
that return base 2 give wrong merges without a warning). An empty segment has out 0 and LSE -inf, and weighs
nothing.

Segments are best stored heads first, as contiguous [kv_heads, rows, head_dim], and passed as the view [rows,
kv_heads, head_dim]. Measured on one core, 12 query and 4 KV heads of 64, one query: 0.15 ms to 0.19 ms at
1024 rows and 0.60 ms to 0.80 ms at 4096 rows, against rows first; from 64 queries on the layout makes no
difference.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from afterglow.kernels.gate import launching_on
from afterglow.kernels.no_memory import ran_out

log = logging.getLogger("afterglow.kernels")

TILE = 256  # queries whose scores are in memory together, where no operator computes them


def attend(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool, window: int = 0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute attention of `q` [n, heads, head_dim] over `keys` and `values` [rows, kv_heads, head_dim] (any
    strides).

    `heads` is a multiple of `kv_heads`; query head h reads KV head h // (heads / kv_heads), nothing is
    repeated. `causal`: the queries are the segment's last n rows, query i sees rows [0, rows - n + i + 1), or, with a
    `window`, the last so many of these. `cap`: a score x counts as cap * tanh(x / cap); 0 for none.
    Returns out [n, heads, head_dim] in q's dtype, and LSE [n, heads], float32, natural log.
    """
    n, rows = q.shape[0], keys.shape[0]
    if causal and rows < n:  # the first queries see nothing
        out, lse = attend(q[n - rows :], keys, values, scale=scale, causal=True, window=window, cap=cap)
        no_out, no_lse = _nothing(q[: n - rows])
        return torch.cat((no_out, out)), torch.cat((no_lse, lse))
    if n == 0 or rows == 0:
        return _nothing(q)  # NOTE: the CPU flash op kills the process here (a division by zero)
    if window and n == 1:
        keys, values, rows = keys[-window:], values[-window:], min(rows, window)
    if cap or rows > window > 0:
        return _limited(q, keys, values, scale, causal, window, cap)
    if not causal or n == 1:
        return _full(q, keys, values, scale)
    past = rows - n
    if past == 0:
        return _square(q, keys, values, scale)
    # The flash ops align their causal mask top left; only a square one means the same as ours.
    return merge(
        (
            _full(q, keys[:past], values[:past], scale),
            _square(q, keys[past:], values[past:], scale),
        )
    )


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return attention over the union of disjoint segments, from `(out, lse)` of each; in any order and grouping.

    All outs are [n, heads, head_dim] of one dtype, all LSEs [n, heads] float32. Computed in float32, rounded
    once. Where every part is empty: out 0, LSE -inf.
    """
    out, lse = parts[0]
    if len(parts) == 1:
        return out, lse
    dtype = out.dtype
    if out.device.type == "cuda" and (fused := _fused(out.device)) is not None:
        out, lse = out.to(torch.float32, copy=True), lse.clone()
        with launching_on(out.device):
            for other, other_lse in parts[1:]:
                fused(out, lse, other, other_lse)
        return out.to(dtype), lse
    out = out.float()
    for other, other_lse in parts[1:]:
        # -inf - -inf is nan where both are empty; any weight will do there. Infinities become huge: the same.
        weight = (other_lse - lse).nan_to_num_(nan=0.0).sigmoid_()
        out = torch.lerp(out, other.float(), weight[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return out.to(dtype), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention `(out, lse)` of a segment and of a row besides, whose scores are `sinks` [heads], float32, and whose values
    are 0."""
    return (out * (lse - sinks).sigmoid_()[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


def merge_into(out: Tensor, lse: Tensor, rows: slice | Tensor, part: tuple[Tensor, Tensor]) -> None:
    """Merge a part, [n, heads, head_dim] and [n, heads], into `rows` (n different rows; a slice or int64) of the results so
    far: `out` [batch, heads, head_dim] and `lse` [batch, heads], float32."""
    if out.device.type == "cuda" and (fused := _fused(out.device)) is not None:
        with launching_on(out.device):
            if isinstance(rows, slice):
                fused(out[rows], lse[rows], *part)
            else:
                fused(out, lse, *part, rows)
        return
    out[rows], lse[rows] = merge(((out[rows], lse[rows]), part))


@functools.cache
def _fused(device: torch.device) -> Callable[..., None] | None:
    """Return the merge as one kernel for a device, or None where Triton is missing or cannot build it. Torch takes five
    kernels, and each reads and writes everything."""
    try:  # the first launch needs a C compiler and Python's headers, which not every container has
        from afterglow.kernels.triton_merge import merge_onto

        part, lse = (torch.zeros(size, dtype=torch.float32, device=device) for size in ((1, 1, 64), (1, 1)))
        with launching_on(device):
            merge_onto(part, lse, part.clone(), lse.clone())
    except ImportError:
        return None
    except Exception as error:
        if ran_out(error):
            raise torch.OutOfMemoryError(str(error)) from error
        log.warning("Triton cannot build its kernels here, so attention is merged by torch: %s", error)
        return None
    return merge_onto


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)


def _full(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention in which every query sees every row. The query heads of a KV head become further queries of that head.

    Faster than handing the op fewer KV heads than query heads (4096 rows, one query: 0.60 to 0.65 ms; rows
    first, 0.80 to 1.09 ms), and the CUDA ops know no grouped heads at all.
    """
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    folded = q.reshape(n, kv_heads, group, head_dim)
    if n > 1:
        folded = folded.transpose(0, 1).reshape(1, kv_heads, n * group, head_dim)
    out, lse = _attention(folded, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale, False)
    if n == 1:
        return out.reshape(1, heads, head_dim), lse.reshape(1, heads)
    out = out[0].reshape(kv_heads, n, group, head_dim).transpose(0, 1).reshape(n, heads, head_dim)
    return out, lse[0].reshape(kv_heads, n, group).transpose(0, 1).reshape(n, heads)


def _square(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute causal attention of as many queries as rows. KV heads are the batch; the heads of a group share a stride-0 view."""
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    shape = (kv_heads, group, n, head_dim)
    out, lse = _attention(
        q.reshape(n, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1)[:, None].expand(shape),
        values.transpose(0, 1)[:, None].expand(shape),
        scale,
        True,
    )
    return out.permute(2, 0, 1, 3).reshape(n, heads, head_dim), lse.permute(2, 0, 1).reshape(n, heads)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention of [batch, heads, rows, head_dim], equal head counts: out, and LSE [batch, heads, queries]."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    head_dim = q.shape[-1]
    if q.device.type == "cuda":
        narrow = q.dtype in (torch.float16, torch.bfloat16)
        if narrow and head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0):
            found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
            return found[0], found[1]
        if head_dim % 8 == 0:
            found = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            return found[0], found[1][..., : q.shape[2]]  # its LSE is padded to a multiple of 32 queries
    return _explicit(q, k, v, scale, causal)


def _limited(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, window: int, cap: float
) -> tuple[Tensor, Tensor]:
    """Compute attention with a window or a cap by the formula itself, a tile of queries after the other; rows that no query of a
    tile sees are not read."""
    n, heads, head_dim = q.shape
    rows, kv_heads = keys.shape[:2]
    folded = q.float().reshape(n, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    outs, lses = [], []
    for first in range(0, n, TILE):
        stop = min(first + TILE, n)
        last = rows - n + stop if causal else rows
        start = max(0, rows - n + first + 1 - window) if window else 0
        k, v = (rows_of[start:last].float().transpose(0, 1)[:, None] for rows_of in (keys, values))
        scores = (folded[:, :, first:stop] @ k.transpose(-1, -2)) * scale
        if cap:
            scores = scores.div_(cap).tanh_().mul_(cap)
        if causal:
            own = torch.arange(rows - n + first, rows - n + stop, device=q.device)[:, None]
            seen = torch.arange(start, last, device=q.device)
            scores.masked_fill_((seen > own) | (seen <= own - (window or rows)), -torch.inf)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse[..., None]).exp_() @ v)
        lses.append(lse)
    out, lse = torch.cat(outs, 2).permute(2, 0, 1, 3), torch.cat(lses, 2).permute(2, 0, 1)
    return out.reshape(n, heads, head_dim).to(q.dtype), lse.reshape(n, heads)


def _explicit(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute the formula itself, scores in float32: for devices and head sizes without a fused operator."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(ahead, -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp_() @ v.float()).to(q.dtype), lse
