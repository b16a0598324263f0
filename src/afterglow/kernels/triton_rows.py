"""Rotate a step's new queries and keys and put keys and values into their contexts, in one launch for a layer.

The un-rotated keys that are saved stay where they were projected to: nothing is written there.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton compiles the kernel from its source; types other than its own would mislead it.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterglow.kernels.context_pages import Pages
from afterglow.kernels.gate import agree
from afterglow.kernels.paged_parts import RowPlaces, row_places
from afterglow.kernels.rope import Rotation, rotate

HEADS = 8  # of a program


@triton.jit(do_not_specialize=["layer"])
def _rotate_and_append(
    q,
    k,
    v,
    cos,
    sin,
    turned,
    data,
    places,
    layer,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    rotation_row,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    lanes: tl.constexpr,
    rotary: tl.constexpr,
    some: tl.constexpr,
):
    # One program for each row and `some` heads: first those of queries, then of keys, then of values.
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    queries: tl.constexpr = (heads + some - 1) // some if rotary else 0
    others: tl.constexpr = (kv_heads + some - 1) // some
    lane = tl.arange(0, lanes)
    inside = lane < head_dim
    place = places + row * 4
    to = data + (tl.multiple_of(tl.load(place), 8) + tl.multiple_of(layer * tl.load(place + 1), 8))
    to_values = tl.multiple_of(tl.load(place + 2), 8)
    to_head = tl.multiple_of(tl.load(place + 3), 8)
    if block >= queries + others:
        head = (block - queries - others) * some + tl.arange(0, some)
        mask = (head < kv_heads)[:, None] & inside[None, :]
        new = tl.load(v + row * v_row + head[:, None] * v_head + lane[None, :], mask=mask)
        tl.store(to + to_values + head[:, None] * to_head + lane[None, :], new, mask=mask)
    else:
        is_key = block >= queries
        head = (block - tl.where(is_key, queries, 0)) * some + tl.arange(0, some)
        mask = (head < tl.where(is_key, kv_heads, heads))[:, None] & inside[None, :]
        if is_key:
            source = k + row * k_row + head * k_head
        else:
            source = q + row * q_row + head * q_head
        x = tl.load(source[:, None] + lane[None, :], mask=mask)
        if rotary:
            turns = lane < rotary
            other = tl.where(lane < rotary // 2, lane + rotary // 2, lane - rotary // 2)
            swapped = tl.load(source[:, None] + other[None, :], mask=mask & turns[None, :], other=0.0)
            at = row * rotation_row + lane
            c = tl.load(cos + at, mask=turns, other=1.0)
            s = tl.load(sin + at, mask=turns, other=0.0)
            x = (x.to(tl.float32) * c[None, :] + swapped.to(tl.float32) * s[None, :]).to(x.dtype)
        if is_key:
            tl.store(to + head[:, None] * to_head + lane[None, :], x, mask=mask)
        else:
            tl.store(turned + (row * heads + head[:, None]) * head_dim + lane[None, :], x, mask=mask)


def place(rows: RowPlaces, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
    """Write `k` [rows, kv_heads, head_dim], turned by `rotation`, and `v` to their places in a layer; return `q` [rows, heads,
    head_dim], turned: a new tensor, or `q` itself without a rotation. All have the contexts' dtype and any strides, but a head's
    dimensions lie side by side. Angles are applied in float32, and a result is rounded once."""
    count, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    turned = q if rotation is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if rotation is None else (angles.contiguous() for angles in rotation)
    rotary = 0 if rotation is None else cos.shape[1]
    blocks = (triton.cdiv(heads, HEADS) if rotary else 0) + 2 * triton.cdiv(kv_heads, HEADS)
    _rotate_and_append[(count, blocks)](
        *(q, k, v, cos, sin, turned, rows.base, rows.places, layer),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        lanes=triton.next_power_of_2(head_dim),
        rotary=rotary,
        some=HEADS,
        num_warps=4,
    )
    return turned


def trial(device: torch.device, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, rotary: int) -> None:
    """Compare with torch's rotation and copies, on three rows of two contexts. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=like)

    expected = [draw(2, 2, kv_heads, rows, head_dim) for rows in (70, 5)]
    contexts = [Pages.of(each) for each in expected]
    where = [(contexts[0], 63, 65), (contexts[1], 0, 1)]
    both = draw(3, heads + 2 * kv_heads, head_dim)
    q, k, v = torch.split(both, [heads, kv_heads, kv_heads], 1)
    rotation = (draw(3, rotary, like=torch.float32), draw(3, rotary, like=torch.float32)) if rotary else None
    turned = place(row_places(where), 1, q, k, v, rotation)
    for i, (at, row) in enumerate(((0, 63), (0, 64), (1, 0))):
        own = None if rotation is None else (rotation[0][i : i + 1], rotation[1][i : i + 1])
        expected[at][1, 0, :, row] = k[i] if own is None else rotate(k[i : i + 1], own)[0]
        expected[at][1, 1, :, row] = v[i]
    rounding = 2 * torch.finfo(dtype).eps
    agree("rotation", turned, q if rotation is None else rotate(q, rotation), rounding)
    for pages, wanted in zip(contexts, expected, strict=True):
        for layer in range(2):
            found = torch.stack(pages.read(layer, 0, wanted.shape[3])).transpose(1, 2)
            agree("new rows", found, wanted[layer], rounding)
