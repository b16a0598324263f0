"""What a selection leaves out, as one key and one value for each chunk: beyond SPEC, which forgets these rows.

A chunk of rows is one row that stands for as many as are left out of it: its key and value are the means of all its rows, and its
score gains the logarithm of their number. Its attention is merged with that of the selected rows by log-sum-exp.

Keys are stored without positions, so that the mean of turned keys is not known to a store. Used instead is the mean of keys as they are
stored, turned by the mean rotation of the chunk's positions: as if the keys of a chunk did not depend on their positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.importance.select import Selection
from afterglow.kernels.rope import rotate
from afterglow.model.decoder import Decoder
from benchmarks.papers.spec.attend import Part, Prefix

CHUNK = 64  # rows


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMeans:
    """One layer's mean keys, positions applied, and mean values: [chunks, kv_heads, head_dim]. `chunk`: its rows."""

    keys: Tensor
    values: Tensor
    chunk: int

    def attend(self, q: Tensor, selection: Selection, scale: float) -> Part:
        """Attend with `q` [rows, heads, head_dim] to what `selection` leaves out: out, and log-sum-exp [rows, heads]."""
        chunks, kv_heads, _ = self.keys.shape
        left = torch.ones(kv_heads, selection.count, device=q.device)
        left.scatter_(1, selection.rows.expand(kv_heads, -1), 0.0)
        counts = torch.zeros(kv_heads, chunks, device=q.device).index_add_(
            1, _chunks(selection.count, self.chunk), left
        )
        group = q.shape[1] // kv_heads
        asking = q.view(len(q), kv_heads, group, -1).float()
        scores = torch.einsum("nkgd,ckd->nkgc", asking, self.keys.float()) * scale + counts.log()[:, None]
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp() if math.isfinite(float(lse.amax())) else torch.zeros_like(scores)
        out = torch.einsum("nkgc,ckd->nkgd", weights.nan_to_num(0.0), self.values.float())
        return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:2])


def means_of(decoder: Decoder, prefix: Prefix, chunk: int = CHUNK) -> list[ChunkMeans]:
    """Return the means of all layers of a prefix that has not been turned."""
    assert not prefix.turned, "keys with positions have lost what is stored"
    rows = len(prefix)
    place = _chunks(rows, chunk)
    rotations = decoder.rotation(torch.arange(rows, device=decoder.device))
    found = []
    for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
        mean = _mean(keys, place)
        rotation = None if rotations is None else rotations.at(layer)
        if rotation is not None:
            mean = rotate(mean, (_mean(rotation[0], place), _mean(rotation[1], place)))
        found.append(ChunkMeans(mean, _mean(values, place), chunk))
    return found


def _chunks(rows: int, chunk: int) -> Tensor:
    return torch.arange(rows) // chunk


def _mean(x: Tensor, place: Tensor) -> Tensor:
    """Average the rows of `x` [rows, ...] that have one place."""
    sums = torch.zeros(int(place[-1]) + 1, *x.shape[1:], dtype=torch.float32, device=x.device).index_add_(
        0, place, x.float()
    )
    return sums / place.bincount().view(-1, *[1] * (x.ndim - 1))


def kept_shares(selections: Sequence[Selection]) -> float:
    """Average over layers the share of rows that a head attends to."""
    return sum(each.kept / each.count for each in selections) / len(selections)
