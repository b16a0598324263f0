"""Rows from host slots: the compiled kernel and torch put the same rows where they belong, and nothing beside."""

from __future__ import annotations

import pytest
import torch

from afterglow.kernels import slot_gather
from afterglow.kernels.built import native
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.rope import rotate
from afterglow.kernels.slot_gather import SlotGather, SlotRows
from afterglow.kernels.stored_rows import narrowed, stored_width, widened

# The ends of slots and of pages, slots in any order, from row 69 of the context on.
PIECES = [SlotRows(6, 61, 64, 69), SlotRows(2, 0, 56, 72), SlotRows(2, 56, 64, 128), SlotRows(0, 0, 56, 136)]
PIECES += [SlotRows(0, 56, 64, 192), SlotRows(5, 9, 50, 200), SlotRows(1, 0, 1, 241)]


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("least", [69, 150, 242])
@pytest.mark.parametrize(("head_dim", "kv_heads", "rotary"), [(64, 3, 64), (80, 2, 32), (16, 1, 0), (24, 2, 24)])
@pytest.mark.parametrize("stored", slot_gather.STORED)
def test_rows_come_where_they_belong(
    stored: torch.dtype,
    head_dim: int,
    kv_heads: int,
    rotary: int,
    least: int,
    built: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not built:
        monkeypatch.setattr(slot_gather, "native", lambda: None)
    elif native() is None:
        pytest.skip("nothing has been built for this machine")
    generator = torch.Generator().manual_seed(head_dim)
    rows = torch.randn(2 * 7 * 64, kv_heads, head_dim, generator=generator)
    arena = narrowed(rows, stored).view(2, 7, 64, kv_heads, stored_width(head_dim, stored))
    rotation = None
    if rotary:
        cos, sin = torch.randn(2, 173, rotary, generator=generator)
        rotation = cos, sin
    wanted = torch.full((2, 2, kv_heads, 256, head_dim), 7.0)
    pages = Pages.of(wanted)
    pages.pop_first()  # what is not held is not needed
    for slot, first, stop, to in PIECES:
        keys, values = (widened(arena[which, slot, first:stop], torch.float32) for which in (0, 1))
        if rotation is not None:
            keys = rotate(keys, (rotation[0][to - 69 :][: len(keys)], rotation[1][to - 69 :][: len(keys)]))
        left = max(0, least - to)
        for which, each in enumerate((keys, values)):
            wanted[1, which, :, to + left : max(to + left, to + stop - first)] = each[left:].transpose(0, 1)
    SlotGather(PIECES, 69).put(arena, pages, 1, rotation, least)
    for layer in range(2):
        found = torch.stack(pages.read(layer, 64, 256)).transpose(1, 2)
        assert torch.equal(found, wanted[layer, :, :, 64:])
