"""Attend to what a selection leaves out, as one key and one value for each chunk of 64 rows: beyond SPEC, which forgets these rows.

A chunk becomes one row, which stands for as many rows as are left out: its key and value are the means of all rows of the chunk, and its
score gains the logarithm of their number. Its attention is merged with that of the selected rows by log-sum-exp.

Keys are stored without positions, so that the mean of rotated keys is not known to a store. Used instead is the mean of keys as they are
stored, rotated by the mean rotation of the chunk's positions: as if the keys of a chunk did not depend on their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.importance.select import Selection
from afterglow.kernels.rope import Rotation, rotate
from afterglow.plan.step import Selectable

NOTHING = -1e30  # the weight of chunks without rows that are left out: softmax knows no row of infinities


class ChunkPlaces(NamedTuple):
    """Tell in which chunk each row of a prefix is, `rows` int64 [rows], and how many are in each, `counts` float32 [chunks + 1].

    Rows that no mean stands for are in one more chunk, the last.
    """

    rows: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMeans:
    """Hold the means of one layer of a prefix: `keys`, rotated, and `values`, float32 [kv_heads, chunks, head_dim]."""

    keys: Tensor
    values: Tensor
    places: ChunkPlaces

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, places: ChunkPlaces, rotation: Rotation | None) -> ChunkMeans:
        """Rotate mean keys. `keys` and `values` [chunks, kv_heads, head_dim]; `rotation`: the mean one of each chunk."""
        if rotation is not None:
            keys = rotate(keys, rotation)
        return cls(keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), places)

    def without(self, selection: Selection) -> LeftOut:
        """Count what a selection leaves out of each chunk."""
        rows, counts = self.places
        taken = rows[selection.rows]
        if taken.ndim == 1:
            gone = torch.bincount(taken, minlength=len(counts))
        else:
            taken += torch.arange(0, taken.shape[0] * len(counts), len(counts), device=taken.device)[:, None]
            gone = torch.bincount(taken.flatten(), minlength=taken.shape[0] * len(counts)).view(-1, 1, len(counts))
        weights = (counts - gone)[..., :-1].log_().clamp_(min=NOTHING)
        return LeftOut(self, weights.expand(len(self.keys), 1, -1))


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """Hold the rows that one layer leaves out. `weights` float32 [kv_heads, 1, chunks]: the logarithm of how many each chunk has, or
    `NOTHING`."""

    means: ChunkMeans
    weights: Tensor

    def attend(self, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend with `q` [rows, heads, head_dim], rotated: out, as `q`, and the log-sum-exp, float32 [rows, heads]."""
        rows, heads, head_dim = q.shape
        kv_heads = len(self.weights)
        folded = q.float().view(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.baddbmm(self.weights, folded, self.means.keys.transpose(1, 2), alpha=scale)
        lse = scores.logsumexp(-1, keepdim=True)
        out = scores.softmax(-1) @ self.means.values
        out, lse = (each.view(kv_heads, rows, heads // kv_heads, -1).transpose(0, 1) for each in (out, lse))
        return out.reshape(q.shape).to(q.dtype), lse.reshape(rows, heads)


def whole_chunks(view: Selectable) -> tuple[int, int]:
    """Return the first chunk of an extent's text that a view has as a whole, and the chunk behind the last. The mean of a chunk that it has
    in part is also of rows that the prefix does not have."""
    first = -(-view.start // BLOCK_ROWS)
    behind = -(-view.rows // BLOCK_ROWS) if view.stop == view.rows else view.stop // BLOCK_ROWS
    return first, max(first, behind)


def chunk_places(views: Sequence[Selectable], device: torch.device) -> ChunkPlaces:
    """Find the rows of a prefix in the whole chunks of its views."""
    found, before = [torch.empty(0, dtype=torch.int64)], 0
    chunks = [whole_chunks(view) for view in views]
    count = sum(behind - first for first, behind in chunks)
    for view, (first, behind) in zip(views, chunks, strict=True):
        number = torch.arange(view.start, view.stop) // BLOCK_ROWS
        found.append(torch.where((number >= first) & (number < behind), number + (before - first), count))
        before += behind - first
    rows = torch.cat(found).to(device)
    return ChunkPlaces(rows, rows.bincount(minlength=count + 1).float())
