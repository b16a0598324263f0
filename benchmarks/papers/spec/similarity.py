"""What selections have in common: between heads, between layers, with chunks (SPEC, Figures 4, 5, 7, 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from afterglow.importance.select import similarity, top


def jaccard(first: Tensor, second: Tensor) -> float:
    """Jaccard index of two sets of rows, given as masks; 1 for two empty ones."""
    either = int((first | second).sum())
    return int((first & second).sum()) / either if either else 1.0


def head_similarity(sums: Tensor, k: int) -> float:
    """Mean Jaccard index of the top k rows over pairs of different heads. `sums` float32 [heads, rows]."""
    return similarity(top(sums, k))


def layer_similarity(sums: Tensor, k: int) -> Tensor:
    """Jaccard indices of adjacent layers' k most important rows, by mean column sums: float32 [layers - 1]. `sums`
    float32 [layers, heads, rows]."""
    sets = top(sums.mean(1), k)
    return torch.tensor([jaccard(sets[i], sets[i + 1]) for i in range(len(sets) - 1)])


def recall(found: Tensor, wanted: Tensor) -> float:
    """Of the wanted rows those that were found; masks. 1 where none is wanted."""
    count = int(wanted.sum())
    return int((found & wanted).sum()) / count if count else 1.0
