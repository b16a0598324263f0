"""Know where rows of a prefix lie in extents' files, and in which chunks (SPEC §IV-D).

The file of an extent may have its rows in the order of their importance, so that rows that are needed together lie together.
Each layer has another order, shared by keys and values. Rows are never moved across extents: another prefix may share
one extent and not the other. Rows are matched and selected by their numbers in the text; only places of bytes follow
`RowOrder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def normalised(mean: Tensor) -> Tensor:
    """Divide the column sums of one layer, float32 [rows], by their mean: 1 is the average row of the prefix.

    So layers and requests count alike, however many tokens a request has. Sums that are all zero stay zero.
    """
    return mean / mean.mean().clamp(min=torch.finfo(torch.float32).tiny)


class RowImportance:
    """Average the importance of each row of an extent, by layer, over the requests that looked at the row.

    `mean` float32 and `count` int32, both [layers, rows], in the order of the text, on the CPU.
    """

    def __init__(self, layers: int, rows: int) -> None:
        self.mean = torch.zeros(layers, rows)
        self.count = torch.zeros(layers, rows, dtype=torch.int32)

    def add(self, layer: int, start: int, values: Tensor) -> None:
        """Add what a request has found in this layer for rows [start, start + len(values)): `normalised` sums."""
        rows = slice(start, start + len(values))
        count = self.count[layer, rows]
        count += 1
        mean = self.mean[layer, rows]
        mean += (values - mean) / count


@dataclass(frozen=True, slots=True, eq=False)
class RowOrder:
    """Map rows of one layer of an extent to their places in the file. Both tensors are int64 [rows].

    `order[j]`: the row of the text that is stored at j. `mapping[i]`: the place of row i of the text (the paper's mapping
    list). Each is the other's inverse.
    """

    order: Tensor
    mapping: Tensor

    @classmethod
    def by(cls, importance: Tensor) -> RowOrder:
        """Put the most important row first, and of equals the earlier one. `importance` float32 [rows]."""
        order = importance.sort(descending=True, stable=True).indices
        return cls(order, order.argsort())

    def stored(self, rows: Tensor, start: int = 0) -> Tensor:
        """Map rows of a view that begins at row `start` of the extent to their places. Rows of the extent outside the view are
        in the same chunks, and never in the result."""
        return self.mapping[start + rows]


class ExtentView(NamedTuple):
    """Name rows [start, stop) of an extent of `rows` rows."""

    rows: int
    start: int
    stop: int


class ChunkPlace(NamedTuple):
    """Name a chunk by the number of the view in the prefix, and of the chunk in the view's extent."""

    view: int
    chunk: int


class RowLayout:
    """Map each row of a prefix to its chunk, in one layer. All tensors are on the CPU.

    `number` int64 [rows]: the number of the row's chunk. Chunks of all extents are numbered in the prefix's order, also chunks
    without a row of the prefix. `stored` int64 [rows]: the row's place in its extent. `within`: its place in its chunk.
    """

    def __init__(
        self, views: Sequence[ExtentView], orders: Sequence[RowOrder | None] | None = None, chunk: int = 64
    ) -> None:
        """`orders`: of each view's extent; None: the order of the text."""
        self.chunk = chunk
        self._chunks: list[ChunkPlace] = []
        stored, numbers = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for index, view in enumerate(views):
            if not 0 <= view.start <= view.stop <= view.rows:
                raise ValueError(f"rows [{view.start}, {view.stop}) are not in an extent of {view.rows}")
            rows = torch.arange(view.stop - view.start)
            order = orders[index] if orders is not None else None
            lies = view.start + rows if order is None else order.stored(rows, view.start)
            stored.append(lies)
            numbers.append(len(self._chunks) + lies // chunk)
            self._chunks += [ChunkPlace(index, i) for i in range(-(-view.rows // chunk))]
        self.stored, self.number = torch.cat(stored), torch.cat(numbers)
        self.within = self.stored % chunk

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> ChunkPlace:
        """Find the chunk with a number."""
        return self._chunks[number]

    def chunks(self, rows: Tensor) -> Tensor:
        """List the numbers of the chunks that rows (int64, in any order) lie in, ascending."""
        return self.hits(rows).nonzero().squeeze(1)

    def hits(self, rows: Tensor) -> Tensor:
        """Count the rows, each given once, in each chunk: int64 [chunks]."""
        return torch.bincount(self.number[rows], minlength=len(self._chunks))

    def by_hits(self, rows: Tensor, least: int = 1) -> list[int]:
        """List the chunks with at least `least` of the rows (each given once): chunks with the most rows first, and equals in
        the rows' order."""
        number = self.number[rows.cpu()]  # a selection may be on the device; layouts never are
        hits = torch.bincount(number, minlength=len(self._chunks))
        first = torch.full((len(self._chunks),), len(rows)).scatter_reduce_(0, number, torch.arange(len(rows)), "amin")
        order = (hits * (len(rows) + 1) - first).argsort(descending=True)
        found: list[int] = order[: int((hits >= least).sum())].tolist()
        return found
