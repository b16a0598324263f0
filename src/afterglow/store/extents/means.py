"""The mean key and value of each chunk of 64 rows, for what a selection leaves out (beyond SPEC)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from afterglow.config import BLOCK_ROWS, SCALE_BYTES
from afterglow.store.extents.head import Bytes
from afterglow.store.extents.layout import KVLayout

_FLOATS = {"F32": np.float32, "F16": np.float16}


def chunk_means(layout: KVLayout, rows: int, keys: Bytes, values: Bytes) -> Bytes:
    """Average each chunk of one layer's first `rows` rows; return the bytes of `layers.{layer}.means` in a file.

    `keys` and `values`: stored rows, uint8 [blocks, 64, row bytes], in the order of the text.
    """
    chunks = layout.file_chunks(rows)
    found = np.zeros((layout.mean_rows(rows), layout.kv_heads * layout.head_dim), np.float32)
    with np.errstate(all="ignore"):  # rows may hold numbers that are not finite
        for first, stored in ((0, keys), (chunks, values)):
            for block in range(layout.blocks(rows)):
                used = stored[block, : rows - block * BLOCK_ROWS]
                found[first + block] = _widened(layout, used).mean(0)
    return found.reshape(-1).view(np.uint8)


def _widened(layout: KVLayout, stored: Bytes) -> npt.NDArray[np.float32]:
    """Return what stored rows, uint8 [rows, row bytes], stand for: [rows, kv_heads x head_dim]."""
    if layout.dtype == "BF16":  # the upper half of a float32
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if layout.dtype == "I8":
        heads = stored.reshape(len(stored), layout.kv_heads, layout.width)
        scales = np.ascontiguousarray(heads[..., -SCALE_BYTES:]).view(np.float32)
        return (heads[..., :-SCALE_BYTES].view(np.int8) * scales).reshape(len(stored), -1)
    return stored.view(_FLOATS[layout.dtype]).astype(np.float32, copy=False)
