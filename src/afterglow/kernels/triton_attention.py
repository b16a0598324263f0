"""Attention of few queries over many parts in pages, two launches for a layer whatever the batch: see `kernels.paged_parts`.

Decoding and the shared rows of RelayAttention are the same kernel: each task reads up to some hundred rows of one KV head once, for
all queries and heads that read them, and writes out and log-sum-exp (float32, natural logarithm). `triton_merge` joins them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.attention import attend
from afterglow.kernels.context_pages import PAGE_ROWS, Pages
from afterglow.kernels.gate import agree
from afterglow.kernels.paged_parts import FIELDS, PartTables, part_of
from afterglow.kernels.triton_merge import merge_parts_onto


@triton.jit(do_not_specialize=["layer"])
def _attend_parts(
    q,
    data,
    tasks,
    pages,
    queries,
    outs,
    lses,
    layer,
    scale,
    cap,
    q_row,
    q_head,
    heads,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    tile: tl.constexpr,
    capped: tl.constexpr,
    fields: tl.constexpr,
    page_rows: tl.constexpr,
    exact: tl.constexpr,
):
    # One program for each task and KV head. `tile` rows of scores: the heads of a group, for each query of the task.
    task = tasks + tl.program_id(0) * fields
    kv_head = tl.program_id(1)
    first_page = tl.load(task)
    stop = tl.load(task + 2)
    first_query = tl.load(task + 3)
    count = tl.load(task + 4)
    own = tl.load(task + 5)
    window = tl.load(task + 6)
    # Rows before all windows may never have come: what their memory holds is no number, which 0 times it is not either.
    start = tl.maximum(tl.load(task + 1), own + 1 - window)
    result = tl.load(task + 7)
    step = tl.load(task + 8)
    keys_at = tl.multiple_of(layer * tl.load(task + 9) + kv_head * tl.load(task + 11), 8)
    to_values = tl.multiple_of(tl.load(task + 10), 8)

    kind = q.dtype.element_ty
    line = tl.arange(0, tile)
    query = line // group
    head = kv_head * group + line % group
    valid = query < count
    row_of_batch = tl.load(queries + first_query + query, mask=valid, other=0)
    lane = tl.arange(0, lanes)
    inside = lane < head_dim
    at_q = q + row_of_batch[:, None] * q_row + head[:, None] * q_head + lane[None, :]
    asking = tl.load(at_q, mask=valid[:, None] & inside[None, :], other=0.0).to(exact)
    last = own + query  # the last row that each query sees

    most = tl.full([tile], -float("inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    found = tl.zeros([tile, lanes], tl.float32)
    within = tl.arange(0, page_rows)
    for page in range(start // page_rows, (stop + page_rows - 1) // page_rows):
        # Places and strides are multiples of 8 elements, since heads have a multiple of 8 dimensions.
        at = data + (tl.multiple_of(tl.load(pages + first_page + page), 8) + keys_at)
        rows = page * page_rows + within
        there = (rows >= start) & (rows < stop)
        offsets = within[:, None] * head_dim + lane[None, :]
        keys = tl.load(at + offsets, mask=there[:, None] & inside[None, :], other=0.0)
        values = tl.load(at + to_values + offsets, mask=there[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(asking, tl.trans(keys.to(exact)), input_precision="ieee") * scale
        if capped:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        seen = there[None, :] & (rows[None, :] <= last[:, None]) & (rows[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        # Where nothing has been seen yet, any finite number serves as the highest score.
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp(scores - base[:, None])
        before = tl.exp(most - base)
        total = total * before + tl.sum(weights, 1)
        found = found * before[:, None]
        found = tl.dot(weights.to(kind).to(exact), values.to(exact), found, input_precision="ieee")
        most = highest
    out = found / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = tl.where(total == 0.0, -float("inf"), most + tl.log(tl.where(total == 0.0, 1.0, total)))
    place = (result + query * step) * heads + head
    tl.store(outs + place[:, None] * head_dim + lane[None, :], out, mask=valid[:, None] & inside[None, :])
    tl.store(lses + place, lse, mask=valid)


def lanes(head_dim: int) -> int:
    """Return how many of a head's dimensions a product takes: a power of two, and 16 at the least, which Triton's products ask for."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def exact(dtype: torch.dtype) -> Any:
    """Return the type that products are made in: the tensors', but the interpreter knows none of bfloat16."""
    interpreted = not isinstance(_attend_parts, triton.JITFunction)  # the interpreter has a class of its own
    return tl.float32 if interpreted or dtype == torch.float32 else getattr(tl, str(dtype).removeprefix("torch."))


def warps(dtype: torch.dtype, head_dim: int) -> int:
    """Return how many warps a program has: as few as hold its numbers in registers."""
    return 8 if dtype == torch.float32 or head_dim > 128 else 4


def stages(dtype: torch.dtype, head_dim: int) -> int:
    """Return how many pages are on their way at a time: as many as fit into shared memory."""
    return 1 if dtype == torch.float32 or head_dim > 128 else 3


def attend_parts(tables: PartTables, layer: int, q: Tensor, scale: float, cap: float, out: Tensor, lse: Tensor) -> None:
    """Merge attention of `q` [batch, heads, head_dim] over the tables' parts in one layer into `out` [batch, heads, head_dim] and
    `lse` [batch, heads], float32. Keys and values have q's dtype; a head's dimensions lie side by side. `cap`: see
    `kernels.attention.attend`."""
    _, heads, head_dim = q.shape
    kv_heads = tables.base.shape[2]
    if q.stride(2) != 1:
        q = q.contiguous()
    outs = torch.empty((tables.count, heads, head_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty((tables.count, heads), dtype=torch.float32, device=q.device)
    _attend_parts[(len(tables.tasks), kv_heads)](
        *(q, tables.base, tables.tasks, tables.pages, tables.queries, outs, lses, layer, scale, cap or 1.0),
        *(q.stride(0), q.stride(1), heads),
        group=heads // kv_heads,
        head_dim=head_dim,
        lanes=lanes(head_dim),
        tile=tables.tile,
        capped=bool(cap),
        fields=FIELDS,
        page_rows=PAGE_ROWS,
        exact=exact(q.dtype),
        num_warps=warps(q.dtype, head_dim),
        num_stages=stages(q.dtype, head_dim),
    )
    merge_parts_onto(out, lse, outs, lses, tables.targets, tables.order)


def trial(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, cap: float) -> None:
    """Compare with `attend` on a few parts: one query, several causal ones, rows that many share, windows, and prefills of several tasks.

    Raises: ArithmeticError if they differ by more than the dtype's rounding allows.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    data, q = draw(1, 2, kv_heads, 530, head_dim), draw(80, heads, head_dim)
    scale = head_dim**-0.5
    reads = (
        (0, 330, range(1), False, 0),
        (70, 300, range(1, 5), True, 0),
        (0, 300, range(5, 6), True, 100),
        (0, 192, range(6, 40), False, 0),
        (0, 530, range(40, 60), True, 0),
        (300, 530, range(60, 80), True, 90),
    )
    pages = Pages.of(data)
    tables = PartTables.of([part_of(pages, *read) for read in reads], heads // kv_heads)
    out = torch.zeros(q.shape, dtype=torch.float32, device=device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=device)
    attend_parts(tables, 0, q, scale, cap, out, lse)
    for start, stop, rows, causal, window in reads:
        keys, values = (data[0, which, :, start:stop].transpose(0, 1) for which in (0, 1))
        asking = q[rows.start : rows.stop]
        expected = attend(asking, keys, values, scale=scale, causal=causal, window=window, cap=cap)
        # A weight and an out are rounded to the dtype once each; float32's own error grows with the sums.
        rounding = max(4 * torch.finfo(dtype).eps, 1e-4)
        agree("attention", out[rows.start : rows.stop], expected[0], rounding)
        agree("its log-sum-exp", lse[rows.start : rows.stop], expected[1], 1e-3)
