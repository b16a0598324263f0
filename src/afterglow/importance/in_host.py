"""Rows of extents that are in host memory as a whole, as a selection asks for them: chunks, probe keys, means."""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.importance.chunk_loader import ChunkLoader
from afterglow.plan.step import Selectable
from afterglow.store.extents.layout import KEYS, VALUES
from afterglow.store.extents.means import chunk_means


def chunk(loader: ChunkLoader, view: Selectable, layer: int, tensor: int, number: int) -> Tensor:
    """Find a chunk in the slots of a view's extent: a slice of one, or a copy of several."""
    size, blocks = loader.chunk_rows, loader.arena[layer, tensor]
    slot, row = divmod(number * size, BLOCK_ROWS)
    if size <= BLOCK_ROWS:
        return blocks[view.slots[slot], row : row + size]
    return blocks.index_select(0, torch.tensor(view.slots[slot : slot + size // BLOCK_ROWS])).flatten(0, 1)


def probe_keys(loader: ChunkLoader, view: Selectable, layer: int) -> Tensor:
    """Gather the probe keys of all rows of a view's extent up to the view's end."""
    keys = loader.arena[layer, KEYS, :, :, : loader.layout.probe_heads]
    return keys.index_select(0, torch.tensor(view.slots[: -(-view.stop // BLOCK_ROWS)])).flatten(0, 1)


def means(loader: ChunkLoader, view: Selectable, layer: int) -> Tensor:
    """Get the means of a view's extent as its file has them: float32 [mean rows, kv_heads, head_dim]."""
    layout = loader.layout

    def made() -> Tensor:
        keys, values = (
            loader.arena[layer, tensor, list(view.slots)].flatten(2).view(torch.uint8).numpy()
            for tensor in (KEYS, VALUES)
        )
        found = torch.from_numpy(chunk_means(layout, view.rows, keys, values)).view(torch.float32)
        return found.view(-1, layout.kv_heads, layout.head_dim)

    return loader.means_of(view.extent, layer, made)
