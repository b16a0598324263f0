"""Gathers as pieces of one slot and one page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from afterglow.config import BLOCK_ROWS
from afterglow.kernels.context_pages import PAGE_ROWS
from afterglow.kernels.slot_gather import SlotRows
from afterglow.plan.step import Gather


def slot_pieces(gathers: Sequence[Gather], at: int) -> Iterator[SlotRows]:
    """Yield what pages get that gathers fill from row `at` on."""
    for gather in gathers:
        row = gather.start
        while row < gather.stop:
            block, first = divmod(row, BLOCK_ROWS)
            stop = min(BLOCK_ROWS, first + gather.stop - row, first + PAGE_ROWS - at % PAGE_ROWS)
            yield SlotRows(gather.slots[block], first, stop, at)
            at, row = at + stop - first, row + stop - first
