"""Keys and values as host memory and disk hold them: in some float dtype, or in 8 bits with a scale for each row and head.

A row of dtype int8 is [kv_heads, head_dim + 4]: of each head `head_dim` signed numbers, and behind them the scale, a float32,
which is the largest magnitude of the head's numbers divided by 127. What was rounded is never rounded again: rows move between
tiers as bytes. Rounding and widening give the same bits with the compiled kernels and with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.config import SCALE_BYTES
from afterglow.kernels.built import native
from afterglow.kernels.passes import suited

LEVELS = 127
LEAST_PEAK = LEVELS * torch.finfo(torch.float32).tiny  # smaller magnitudes are rounded as if this were the largest
MOST_SCALE = float.fromhex("0x1.020406p+121")  # times 127, the largest that is finite


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Count the elements of `dtype` that a head of a stored row has."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def narrowed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `rows` [rows, kv_heads, head_dim] to stored ones: `dtype` [rows, kv_heads, `stored_width`].

    With dtype int8, a head with a number that is not finite is stored so that all its numbers are NaN when they are read.
    """
    if dtype != torch.int8:
        return rows.to(dtype)
    library = suited(rows)
    if library is None:
        return _narrowed(rows.float())
    (count, heads, size), (row, head, _) = rows.shape, rows.stride()
    out = torch.empty((count, heads, size + SCALE_BYTES), dtype=torch.int8)
    job = {
        "x": (rows.data_ptr(), row, head),
        "out": out.data_ptr(),
        "rows": count,
        "heads": heads,
        "head_dim": size,
    }
    library.lib.afterglow_narrow(library.new("afterglow_narrowing *", job), torch.get_num_threads(), library.width)
    return out


def widened(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [rows, kv_heads, head_dim] that stored ones stand for, in a float `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    rows = torch.empty((*stored.shape[:-1], stored.shape[-1] - SCALE_BYTES), dtype=dtype, device=stored.device)
    widen_into(stored, rows)
    return rows


def widen_into(stored: Tensor, out: Tensor) -> None:
    """Write what stored rows of dtype int8 stand for into `out` [rows, kv_heads, head_dim] of any strides, on the same device."""
    library = suited(out) if _in_one_run(stored) else None
    if library is None:
        out.copy_(_widened(stored))
        return
    (count, heads, size), (row, head, _) = out.shape, out.stride()
    job = {
        "stored": stored.data_ptr(),
        "stride": stored.stride(0),
        "out": (out.data_ptr(), row, head),
        "rows": count,
        "heads": heads,
        "head_dim": size,
    }
    library.lib.afterglow_widen(library.new("afterglow_widening *", job), torch.get_num_threads(), library.width)


def _in_one_run(stored: Tensor) -> bool:
    """Check whether each row's bytes follow each other in memory that the compiled kernels can read."""
    return stored.device.type == "cpu" and stored.stride()[1:] == (stored.shape[2], 1) and native() is not None


def _narrowed(rows: Tensor) -> Tensor:
    finite = rows.isfinite().all(-1, keepdim=True)
    peak = rows.abs().amax(-1, keepdim=True)
    scale = peak.clamp_min(LEAST_PEAK).div_(LEVELS).clamp_max_(MOST_SCALE)
    numbers = torch.where(finite, rows / scale, 0).round_().to(torch.int8)  # ties to even
    return torch.cat((numbers, torch.where(finite, scale, torch.nan).view(torch.int8)), -1)


def _widened(stored: Tensor) -> Tensor:
    scale = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return stored[..., :-SCALE_BYTES].to(torch.float32) * scale
