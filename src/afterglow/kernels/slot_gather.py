"""Rows that come from slots of host memory to a context: read, widened and rotated in one pass over a layer.

On a CPU a compiled kernel does it, on CUDA one of Triton's, which reads host memory that is locked for the device. Otherwise
torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from afterglow.kernels.built import Native, native
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.gate import Gate
from afterglow.kernels.paged_parts import suited
from afterglow.kernels.rope import Rotation, rotate
from afterglow.kernels.sending import on_device
from afterglow.kernels.stored_rows import widened

STORED = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  # in the order of afterglow.h's numbers
LANES = 16  # the compiled kernel takes heads of multiples of it

_gate = Gate("triton_gather")


class SlotRows(NamedTuple):
    """Rows [first, stop) of a slot's 64, which go to rows from `at` on of a context, all in one page."""

    slot: int
    first: int
    stop: int
    at: int


class SlotGather:
    """Which rows one context gets in a step. Tables are made at the first layer."""

    def __init__(self, pieces: Sequence[SlotRows], angles_from: int) -> None:
        """`pieces`: in the order of the context's rows. `angles_from`: the row of the context that the rotations begin with."""
        self._pieces, self._angles_from = pieces, angles_from
        self._numbers: Any = None  # the pieces, as the compiled kernel takes them
        self._tables: dict[
            Pages, tuple[Tensor, Tensor]
        ] = {}  # as Triton's kernel does, and what their places are counted from

    def put(self, stored: Tensor, pages: Pages, layer: int, rotation: Rotation | None, least: int) -> None:
        """Put keys, rotated, and values of the rows from `least` on into one layer of the context.

        `stored` [2, slots, 64, kv_heads, stored width]: the layer of the host's slots.
        """
        like = pages.data
        plain = stored.dtype in STORED and stored[0, 0].is_contiguous()
        if plain and like.device.type == "cpu" and like.dtype == torch.float32 and like.shape[4] % LANES == 0:
            library = native()
            if library is not None:
                self._put_compiled(library, stored, pages, layer, rotation, least)
                return
        if (
            plain
            and like.device.type == "cuda"
            and suited(like.dtype, like.shape[4], 1)
            and self._put_on_device(stored, pages, layer, rotation, least)
        ):
            return
        self._put_each(stored, pages, layer, rotation, least)

    def _put_compiled(
        self, library: Native, stored: Tensor, pages: Pages, layer: int, rotation: Rotation | None, least: int
    ) -> None:
        if self._numbers is None:
            self._numbers = library.new("int64_t[]", [number for piece in self._pieces for number in piece])
        cos, sin = (angles.contiguous() for angles in rotation) if rotation is not None else (None, None)
        job = {
            "stored": stored.data_ptr(),
            "plane_bytes": stored.stride(0) * stored.element_size(),
            "row_bytes": stored[0, 0, 0].nbytes,
            "kind": STORED.index(stored.dtype),
            "pieces": library.address(self._numbers),
            "count": len(self._pieces),
            "least": least,
            "pages": pages.table,
            "apart": pages.apart,
            "layer": layer,
            "kv_heads": stored.shape[3],
            "head_dim": pages.data.shape[4],
            "cos": 0 if cos is None else cos.data_ptr(),
            "sin": 0 if sin is None else sin.data_ptr(),
            "angles_from": self._angles_from,
            "rotary_dim": 0 if cos is None else cos.shape[-1],
        }
        library.lib.afterglow_gather(library.new("afterglow_gathering *", job), torch.get_num_threads(), library.width)

    def _put_on_device(self, stored: Tensor, pages: Pages, layer: int, rotation: Rotation | None, least: int) -> bool:
        """Return whether Triton's kernel has done it."""
        like = pages.data
        rotary = 0 if rotation is None else rotation[0].shape[1]

        def launch(kernels: ModuleType) -> bool:
            if pages not in self._tables:
                self._tables[pages] = like, slot_table(self._pieces, pages, like)
            base, table = self._tables[pages]
            kernels.gather(stored, base, layer, table, rotation, least, self._angles_from)
            return True

        kind = like.device, like.dtype, stored.dtype, like.shape[4], like.shape[2], rotary
        return _gate.run(launch, *kind) is not None

    def _put_each(self, stored: Tensor, pages: Pages, layer: int, rotation: Rotation | None, least: int) -> None:
        found = [piece for piece in self._pieces if piece.at + piece.stop - piece.first > least]
        if not found:
            return
        like, skip = pages.data, max(0, least - found[0].at)
        keys, values = (
            widened(
                torch.cat([plane[slot, first:stop] for slot, first, stop, _ in found])[skip:].to(
                    like.device, non_blocking=True
                ),
                like.dtype,
            )
            for plane in stored
        )
        at = found[0].at + skip
        if rotation is not None:
            own = slice(at - self._angles_from, at - self._angles_from + len(keys))
            keys = rotate(keys, (rotation[0][own], rotation[1][own]))
        pages.write(layer, at, keys, values)


def slot_table(pieces: Sequence[SlotRows], pages: Pages, base: Tensor) -> Tensor:
    """Return where rows come from and go to, int64 [pieces, 5] on the pages' device: the piece, and the place of its first row in layer
    0, in elements from the beginning of `base`. Pieces whose rows are not held go nowhere: they end where they begin."""
    table: list[int] = []
    for slot, first, stop, at in pieces:
        if at < pages.first:
            table += (slot, first, first, at, 0)
            continue
        (page,) = pages.offsets(at, at + 1, base)
        table += (slot, first, stop, at, page + at % base.shape[3] * base.stride(3))
    return on_device(table, base.device).view(-1, 5)
