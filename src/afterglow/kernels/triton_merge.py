"""The merge of attention parts as one Triton kernel: each out and LSE is read once and written once.

RelayAttention §3.3 calls it relay fusion. Needs Triton (the extra `gpu`; torch for CUDA on Linux brings it along).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_onto(
    out,
    lse,
    part,
    part_lse,
    rows,
    head_dim,
    out_row,
    out_head,
    lse_row,
    lse_head,
    part_row,
    part_head,
    part_lse_row,
    part_lse_head,
    scattered: tl.constexpr,
    lanes: tl.constexpr,
):
    # One program for each row of the part and head. Offsets are 64 bits wide: a large batch has more than 2**31 bytes.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    to = tl.load(rows + row) if scattered else row
    at_lse = lse + to * lse_row + head * lse_head
    before = tl.load(at_lse).to(tl.float32)
    new = tl.load(part_lse + row * part_lse_row + head * part_lse_head).to(tl.float32)
    most = tl.maximum(before, new)
    # Where both are -inf there is nothing to weigh: any finite number serves as the largest, and both weights are 0.
    base = tl.where(most == -float("inf"), 0.0, most)
    old_weight = tl.exp(before - base)
    new_weight = tl.exp(new - base)
    total = old_weight + new_weight
    divisor = tl.where(total == 0.0, 1.0, total)
    lane = tl.arange(0, lanes)
    inside = lane < head_dim
    at_out = out + to * out_row + head * out_head + lane
    old = tl.load(at_out, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(part + row * part_row + head * part_head + lane, mask=inside, other=0.0).to(tl.float32)
    # What weighs nothing may hold anything.
    old = tl.where(old_weight == 0.0, 0.0, old)
    other = tl.where(new_weight == 0.0, 0.0, other)
    merged = (old * (old_weight / divisor)) + (other * (new_weight / divisor))
    tl.store(at_out, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(at_lse, tl.where(total == 0.0, -float("inf"), base + tl.log(divisor)))


@triton.jit
def _merge_parts_onto(
    out,
    lse,
    parts,
    part_lses,
    targets,
    order,
    heads,
    out_row,
    out_head,
    lse_row,
    lse_head,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    few: tl.constexpr,
):
    # One program for each target and head: `few` parts at a time, as one more part that has been merged already.
    target = targets + tl.program_id(0) * 3
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(target)
    first = tl.load(target + 1)
    stop = tl.load(target + 2)
    lane = tl.arange(0, lanes)
    inside = lane < head_dim
    at_lse = lse + row * lse_row + head * lse_head
    at_out = out + row * out_row + head * out_head + lane
    most = tl.load(at_lse)
    total = tl.where(most == -float("inf"), 0.0, 1.0)
    found = tl.load(at_out, mask=inside, other=0.0)
    found = tl.where(total == 0.0, 0.0, found)  # what weighs nothing may hold anything
    place = tl.arange(0, few)
    for begin in range(first, stop, few):
        there = begin + place < stop
        part = tl.load(order + begin + place, mask=there, other=0) * heads + head
        new = tl.load(part_lses + part, mask=there, other=-float("inf"))
        others = tl.load(
            parts + part[:, None] * head_dim + lane[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        highest = tl.maximum(most, tl.max(new, 0))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp(new - base)
        before = tl.exp(most - base)
        total = total * before + tl.sum(weights, 0)
        found = found * before + tl.sum(others * weights[:, None], 0)
        most = highest
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(at_out, found / divisor, mask=inside)
    tl.store(at_lse, tl.where(total == 0.0, -float("inf"), most + tl.log(divisor)))


def merge_parts_onto(
    out: Tensor, lse: Tensor, parts: Tensor, part_lses: Tensor, targets: Tensor, order: Tensor
) -> None:
    """Merge many parts in one launch, in place: for each target (row, first, stop) of `targets` int64 [n, 3], the parts `order[first:
    stop]`, in this order, into row `row` of `out` [batch, heads, head_dim] and `lse` [batch, heads].

    `parts` [parts, heads, head_dim] and `part_lses` [parts, heads] are contiguous; a part of LSE -inf holds finite numbers. All
    are float32, LSEs natural logarithms. Rows of different targets differ.
    """
    _, heads, head_dim = parts.shape
    if out.dtype != torch.float32 or lse.dtype != torch.float32 or out.stride(2) != 1:
        raise ValueError(f"results must be float32 with heads in one run, got {out.dtype}, {lse.dtype}, {out.stride()}")
    _merge_parts_onto[(len(targets), heads)](
        *(out, lse, parts, part_lses, targets, order, heads),
        *(*out.stride()[:2], *lse.stride()),
        head_dim=head_dim,
        lanes=triton.next_power_of_2(head_dim),
        few=8,
        num_warps=1 if head_dim <= 128 else 2,
    )


def merge_onto(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None = None) -> None:
    """Merge `part` [n, heads, head_dim] and `part_lse` [n, heads] into `out` [batch, heads, head_dim] and `lse` [batch,
    heads], in place: into its rows `rows` (int64 [n], all different), or its first n.

    LSEs are float32, natural logarithm, -inf where nothing has been seen; outs of any floating dtypes, computed in float32 and
    rounded once. Rows and heads may have any strides (a flash operator's LSE comes transposed); a head's dimensions must lie
    side by side.
    """
    n, heads, head_dim = part.shape
    if out.stride(2) != 1 or (part.stride(2) != 1 and part.numel()):
        raise ValueError(f"a head's dimensions must lie side by side, got strides {out.stride()} and {part.stride()}")
    if lse.dtype != torch.float32 or part_lse.dtype != torch.float32:
        raise ValueError(f"log-sum-exps must be float32, got {lse.dtype} and {part_lse.dtype}")
    if part.numel() == 0:
        return
    _merge_onto[(n, heads)](
        out,
        lse,
        part,
        part_lse,
        rows if rows is not None else lse,
        head_dim,
        *out.stride()[:2],
        *lse.stride(),
        *part.stride()[:2],
        *part_lse.stride(),
        scattered=rows is not None,
        lanes=triton.next_power_of_2(head_dim),
        num_warps=4 if head_dim > 64 else 1,
    )
