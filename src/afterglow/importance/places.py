"""Which chunks the rows of a prefix lie in: a prefix is a list of views of extents, each stored in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from afterglow.importance.order import Order


class View(NamedTuple):
    """Rows [start, stop) of an extent that has `rows`."""

    rows: int
    start: int
    stop: int


class Chunk(NamedTuple):
    """A chunk by its place: which of the prefix's views, and which chunk of that view's extent."""

    view: int
    chunk: int


class Places:
    """Where each row of a prefix lies, in one layer. On the CPU, as the rows that it is asked about.

    `number` int64 [rows]: its chunk's number, counting those of all extents in the prefix's order, also of chunks that
    the prefix has no row in. `stored` int64 [rows]: its place in its extent; `within`: in its chunk.
    """

    def __init__(self, views: Sequence[View], orders: Sequence[Order | None] | None = None, chunk: int = 64) -> None:
        """`orders`: of each view's extent; None: as the text goes."""
        self.chunk = chunk
        self._chunks: list[Chunk] = []
        stored, numbers = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for index, view in enumerate(views):
            if not 0 <= view.start <= view.stop <= view.rows:
                raise ValueError(f"rows [{view.start}, {view.stop}) are not in an extent of {view.rows}")
            rows = torch.arange(view.stop - view.start)
            order = orders[index] if orders is not None else None
            lies = view.start + rows if order is None else order.stored(rows, view.start)
            stored.append(lies)
            numbers.append(len(self._chunks) + lies // chunk)
            self._chunks += [Chunk(index, i) for i in range(-(-view.rows // chunk))]
        self.stored, self.number = torch.cat(stored), torch.cat(numbers)
        self.within = self.stored % chunk

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> Chunk:
        """The chunk of a number."""
        return self._chunks[number]

    def chunks(self, rows: Tensor) -> Tensor:
        """Numbers of the chunks that rows (int64, in any order) lie in, ascending."""
        return self.hits(rows).nonzero().squeeze(1)

    def hits(self, rows: Tensor) -> Tensor:
        """How many of the rows, each given once, lie in each chunk: int64 [chunks]."""
        return torch.bincount(self.number[rows.cpu()], minlength=len(self._chunks))

    def by_hits(self, rows: Tensor, least: int = 1) -> list[int]:
        """Numbers of the chunks that rows (each given once) lie in, at least so many of them, those with the most first; of
        equals in the rows' order."""
        number = self.number[rows.cpu()]  # a selection may lie on the device; what is known of files never does
        hits = torch.bincount(number, minlength=len(self._chunks))
        first = torch.full((len(self._chunks),), len(rows)).scatter_reduce_(0, number, torch.arange(len(rows)), "amin")
        order = (hits * (len(rows) + 1) - first).argsort(descending=True)
        found: list[int] = order[: int((hits >= least).sum())].tolist()
        return found
