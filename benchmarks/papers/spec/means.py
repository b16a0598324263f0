"""What a selection leaves out, as one key and one value for each chunk (`importance/left_out.py`), for a prefix that is in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.importance.left_out import ChunkMeans, ChunkPlaces
from afterglow.importance.select import Selection, after_prompt
from afterglow.model.decoder import Decoder
from benchmarks.papers.spec.attend import LeftOut, Part, Prefix


def means_of(decoder: Decoder, prefix: Prefix, chunk: int = BLOCK_ROWS) -> list[ChunkMeans]:
    """Return the means of all layers of a prefix that has not been turned."""
    assert not prefix.turned, "keys with positions have lost what is stored"
    rows = torch.arange(len(prefix), device=decoder.device) // chunk
    counts = rows.bincount()
    places = ChunkPlaces(rows, torch.cat((counts, counts.new_zeros(1))).float())

    def mean(x: Tensor) -> Tensor:
        sums = torch.zeros(len(counts), *x.shape[1:], device=x.device)
        return sums.index_add_(0, rows, x.float()) / counts[:, None, None]

    rotations = decoder.rotation(torch.arange(len(prefix), device=decoder.device))
    averaged = None if rotations is None else rotations.averaged(rows, len(counts))
    return [
        ChunkMeans.of(mean(keys), mean(values), places, None if averaged is None else averaged.at(layer))
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True))
    ]


def left_out(means: Sequence[ChunkMeans], system: int = 0) -> LeftOut:
    """Attend to what was not selected, as means. `system`: the prefix's first rows that are always attended to."""

    def part(layer: int, q: Tensor, selection: Selection, scale: float) -> Part:
        return means[layer].without(after_prompt(selection, system)).attend(q, scale)

    return part


def kept_shares(selections: Sequence[Selection]) -> float:
    """Average over layers the share of rows that a head attends to."""
    return sum(each.kept / each.count for each in selections) / len(selections)
