"""Attend to what a selection leaves out, as one key and one value for each chunk of 64 rows: beyond SPEC, which forgets these rows.

A chunk of rows is one row that stands for as many as are left out of it: its key and value are the means of all its rows, and its
score gains the logarithm of their number. Its attention is merged with that of the selected rows by log-sum-exp.

Keys are stored without positions, so that the mean of rotated keys is not known to a store. Used instead is the mean of keys as they are
stored, rotated by the mean rotation of the chunk's positions: as if the keys of a chunk did not depend on their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.config import BLOCK_ROWS
from afterglow.importance.select import Selection
from afterglow.kernels.rope import Rotation, rotate
from afterglow.plan.step import Selectable


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMeans:
    """Hold the means of one layer of a prefix: `keys`, rotated, and `values`, float32 [kv_heads, chunks, head_dim].

    `places` int64 [rows]: the chunk of each row of the prefix; `chunks` for rows that no mean stands for.
    """

    keys: Tensor
    values: Tensor
    places: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, places: Tensor, rotation: Rotation | None) -> ChunkMeans:
        """Rotate mean keys. `keys` and `values` [chunks, kv_heads, head_dim]; `rotation`: of all rows of the prefix."""
        if rotation is not None:
            cos, sin = (_mean(each, places, len(keys)) for each in rotation)
            keys = rotate(keys, (cos, sin))
        return cls(keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), places)

    def without(self, selection: Selection) -> LeftOut:
        """Count what a selection leaves out of each chunk."""
        kv_heads, chunks = self.keys.shape[:2]
        taken = self.places[selection.rows].view(-1, selection.kept)
        taken = taken + (chunks + 1) * torch.arange(len(taken), device=taken.device)[:, None]
        gone = torch.bincount(taken.flatten(), minlength=(chunks + 1) * len(taken)).view(-1, chunks + 1)
        counts = (torch.bincount(self.places, minlength=chunks + 1) - gone)[:, :chunks]
        return LeftOut(self, counts.float().log_().expand(kv_heads, -1))


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """Hold the rows that one layer leaves out. `weights` float32 [kv_heads, chunks]: the logarithm of how many each chunk has."""

    means: ChunkMeans
    weights: Tensor

    def attend(self, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend with `q` [rows, heads, head_dim], rotated: out, as `q`, and the log-sum-exp, float32 [rows, heads]."""
        rows, heads, head_dim = q.shape
        kv_heads = len(self.weights)
        folded = q.float().view(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = (folded @ self.means.keys.transpose(1, 2)).mul_(scale).add_(self.weights[:, None])
        lse = scores.logsumexp(-1, keepdim=True)
        # Where a head leaves nothing out, all scores are -inf.
        out = scores.sub_(lse).exp_().nan_to_num_(nan=0.0) @ self.means.values
        out, lse = (each.view(kv_heads, rows, heads // kv_heads, -1).transpose(0, 1) for each in (out, lse))
        return out.reshape(q.shape).to(q.dtype), lse.reshape(rows, heads)


def whole_chunks(view: Selectable) -> tuple[int, int]:
    """Return the first chunk of an extent's text that a view has as a whole, and the chunk behind the last. The mean of a chunk that it has
    in part is also of rows that the prefix does not have."""
    first = -(-view.start // BLOCK_ROWS)
    behind = -(-view.rows // BLOCK_ROWS) if view.stop == view.rows else view.stop // BLOCK_ROWS
    return first, max(first, behind)


def chunk_places(views: Sequence[Selectable]) -> Tensor:
    """Tell in which of their whole chunks each row of a prefix is, int64 [rows]; rows of other chunks are behind the last."""
    found, before = [torch.empty(0, dtype=torch.int64)], 0
    chunks = [whole_chunks(view) for view in views]
    count = sum(behind - first for first, behind in chunks)
    for view, (first, behind) in zip(views, chunks, strict=True):
        number = torch.arange(view.start, view.stop) // BLOCK_ROWS
        found.append(torch.where((number >= first) & (number < behind), number + (before - first), count))
        before += behind - first
    return torch.cat(found)


def _mean(x: Tensor, places: Tensor, chunks: int) -> Tensor:
    """Average the rows of `x` [rows, width] that have one place."""
    sums = x.new_zeros(chunks + 1, x.shape[1]).index_add_(0, places, x)
    return (sums / torch.bincount(places, minlength=chunks + 1)[:, None])[:chunks]
