"""Read stored rows out of slots of host memory that the device sees, and put them into a context, in one launch for a layer.

Each number crosses the bus once: keys are widened and rotated where they arrive. Few programs go through all the rows, so that
others find room beside them: what limits them is the bus.
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
from afterglow.kernels.rope import Rotation, rotate
from afterglow.kernels.slot_gather import SlotRows, slot_table
from afterglow.kernels.stored_rows import narrowed, stored_width, widened

BLOCK = 64  # rows of a slot
LINES = 16  # a task: so many heads of rows that lie behind each other in a slot
PROGRAMS = 128  # of 4 KiB on their way, each: several times what a bus holds


@triton.jit
def _widened(at, mask, scale, rounded: tl.constexpr):
    x = tl.load(at, mask=mask, other=0).to(tl.float32)
    if rounded:
        x = x * scale[:, None]
    return x


@triton.jit(do_not_specialize=["layer", "tasks", "least", "angles_from"])
def _gather(
    stored,
    to,
    cos,
    sin,
    pieces,
    tasks,
    layer,
    least,
    angles_from,
    stored_which,
    stored_slot,
    to_layer,
    to_which,
    to_head,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    rotary: tl.constexpr,
    lanes: tl.constexpr,
    half_lanes: tl.constexpr,
    rest_lanes: tl.constexpr,
    some: tl.constexpr,
    rounded: tl.constexpr,
):
    # A task is `some` lines of the keys, or values, of one piece. A line is one head of one row.
    tiles: tl.constexpr = (64 * kv_heads + some - 1) // some
    half: tl.constexpr = rotary // 2
    kind = to.dtype.element_ty
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        piece = pieces + task // (2 * tiles) * 5
        slot = tl.load(piece)
        first = tl.load(piece + 1)
        stop = tl.load(piece + 2)
        is_value = task // tiles % 2
        line = task % tiles * some + tl.arange(0, some)
        row = line // kv_heads
        place = tl.load(piece + 3) + (row - first)  # row of the context
        mask = (row >= first) & (row < stop) & (place >= least)
        source = stored + (is_value * stored_which + slot * stored_slot) + line * width
        target = to + tl.load(piece + 4) + layer.to(tl.int64) * to_layer + is_value * to_which
        target += (line % kv_heads) * to_head + (row - first) * head_dim
        scale = mask
        if rounded:
            scale = tl.load((source + head_dim).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
        turned = rotary * (1 - is_value)
        if turned == 0:
            whole_lane = tl.arange(0, lanes)
            whole = mask[:, None] & (whole_lane < head_dim)[None, :]
            all_numbers = _widened(source[:, None] + whole_lane[None, :], whole, scale, rounded)
            tl.store(target[:, None] + whole_lane[None, :], all_numbers.to(kind), mask=whole)
        else:
            lane = tl.arange(0, half_lanes)
            inside = mask[:, None] & (lane < half)[None, :]
            low = _widened(source[:, None] + lane[None, :], inside, scale, rounded)
            high = _widened(source[:, None] + (lane + half)[None, :], inside, scale, rounded)
            at = ((place - angles_from) * rotary)[:, None] + lane[None, :]
            c = tl.load(cos + at, mask=inside, other=0.0)
            s = tl.load(sin + at, mask=inside, other=0.0)
            tl.store(target[:, None] + lane[None, :], (low * c + high * s).to(kind), mask=inside)
            c = tl.load(cos + half + at, mask=inside, other=0.0)
            s = tl.load(sin + half + at, mask=inside, other=0.0)
            tl.store(target[:, None] + (lane + half)[None, :], (high * c + low * s).to(kind), mask=inside)
            if rotary < head_dim:
                rest_lane = rotary + tl.arange(0, rest_lanes)
                rest = mask[:, None] & (rest_lane < head_dim)[None, :]
                others = _widened(source[:, None] + rest_lane[None, :], rest, scale, rounded)
                tl.store(target[:, None] + rest_lane[None, :], others.to(kind), mask=rest)


def gather(
    stored: Tensor,
    base: Tensor,
    layer: int,
    table: Tensor,
    rotation: Rotation | None,
    least: int,
    angles_from: int,
) -> None:
    """Do what `kernels.slot_gather.SlotGather.put` does, with its table. `base`: a page that the places are counted from."""
    _, _, kv_heads, _, head_dim = base.shape
    cos, sin = (base, base) if rotation is None else (angles.contiguous() for angles in rotation)
    rotary = 0 if rotation is None else cos.shape[1]
    tasks = len(table) * 2 * triton.cdiv(BLOCK * kv_heads, LINES)
    if tasks == 0:
        return
    _gather[(min(tasks, PROGRAMS),)](
        *(stored, base, cos, sin, table, tasks, layer, least, angles_from),
        *(*stored.stride()[:2], *base.stride()[:3]),
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=stored.shape[4],
        rotary=rotary,
        lanes=triton.next_power_of_2(head_dim),
        half_lanes=triton.next_power_of_2(max(1, rotary // 2)),
        rest_lanes=triton.next_power_of_2(max(1, head_dim - rotary)),
        some=LINES,
        rounded=stored.dtype == torch.int8,
        num_warps=4,
    )


def trial(
    device: torch.device, dtype: torch.dtype, stored: torch.dtype, head_dim: int, kv_heads: int, rotary: int
) -> None:
    """Compare with torch's copies and rotation, on rows of three slots. Raises: ArithmeticError if they differ."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * 3 * BLOCK, kv_heads, head_dim, generator=generator)
    shape = 2, 3, BLOCK, kv_heads, stored_width(head_dim, stored)
    arena = torch.empty(shape, dtype=stored, pin_memory=device.type == "cuda")
    arena.copy_(narrowed(rows, stored).view(shape))
    there = arena.to(device)
    spots = [SlotRows(2, 60, 64, 5), SlotRows(0, 0, 55, 9), SlotRows(0, 55, 64, 64), SlotRows(1, 0, 3, 73)]
    before = torch.zeros(2, 2, kv_heads, 80, head_dim, dtype=dtype, device=device)
    pages, expected = Pages.of(before), before.clone()
    rotation = None
    if rotary:
        cos, sin = (torch.randn(72, rotary, generator=generator).to(device) for _ in range(2))
        rotation = cos, sin
    for slot, first, stop, at in spots:
        keys, values = (widened(there[which, slot, first:stop], torch.float32) for which in (0, 1))
        if rotation is not None:
            keys = rotate(
                keys, (rotation[0][at - 4 : at - 4 + stop - first], rotation[1][at - 4 : at - 4 + stop - first])
            )
        expected[1, 0, :, at : at + stop - first] = keys.transpose(0, 1)
        expected[1, 1, :, at : at + stop - first] = values.transpose(0, 1)
    expected[:, :, :, 5:7] = 0
    gather(arena, pages.data, 1, slot_table(spots, pages, pages.data), rotation, 7, 4)
    for layer in range(2):
        for found, wanted in zip(pages.read(layer, 0, 80), expected[layer], strict=True):
            agree("gathered rows", found, wanted.transpose(0, 1), 2 * torch.finfo(dtype).eps)
