"""Rows of an extent in the order of their importance, so that those that are needed together lie together (SPEC, IV-D;
spec S12, S13).

Never across extents: another prefix may share one and not the other. Each layer has an order of its own, shared by keys
and values. What is matched, shown and selected is numbered in the order of the text; only where bytes lie follows `Order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def normalised(mean: Tensor) -> Tensor:
    """Column sums of one layer, float32 [rows], as multiples of their mean: 1 is the average row of its prefix. So layers
    and requests count alike however many tokens asked. Zeros where all are zero."""
    return mean / mean.mean().clamp(min=torch.finfo(torch.float32).tiny)


class Importance:
    """Average importance of each row of an extent, over the requests that looked at it, by layer.

    `mean` float32 and `count` int32, both [layers, rows], in the order of the text, on the CPU.
    """

    def __init__(self, layers: int, rows: int) -> None:
        self.mean = torch.zeros(layers, rows)
        self.count = torch.zeros(layers, rows, dtype=torch.int32)

    def add(self, layer: int, start: int, values: Tensor) -> None:
        """A request has looked at rows [start, start + len(values)) in this layer, and found `values` (`normalised`)."""
        rows = slice(start, start + len(values))
        count = self.count[layer, rows]
        count += 1
        mean = self.mean[layer, rows]
        mean += (values - mean) / count

    def split(self, row: int) -> tuple[Importance, Importance]:
        """Of an extent's first `row` rows, and of the others; both are stored in the order of the text again."""
        return self._part(slice(0, row)), self._part(slice(row, None))

    @classmethod
    def joined(cls, parts: Sequence[Importance]) -> Importance:
        """Of an extent that several were merged into, one after the other."""
        whole = cls(len(parts[0].mean), 0)
        whole.mean = torch.cat([part.mean for part in parts], 1)
        whole.count = torch.cat([part.count for part in parts], 1)
        return whole

    def _part(self, rows: slice) -> Importance:
        part = Importance(len(self.mean), 0)
        part.mean, part.count = self.mean[:, rows].clone(), self.count[:, rows].clone()
        return part


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """How the rows of one layer of an extent are stored. Both int64 [rows].

    `order[j]`: the row of the text that is stored at j. `mapping[i]`: where row i of the text is stored; the paper's
    mapping list. Each is the other's inverse.
    """

    order: Tensor
    mapping: Tensor

    @classmethod
    def of_text(cls, rows: int) -> Order:
        """As the text goes."""
        same = torch.arange(rows)
        return cls(same, same)

    @classmethod
    def by(cls, importance: Tensor) -> Order:
        """The most important row first; of equals the earlier one. `importance` float32 [rows]."""
        order = importance.sort(descending=True, stable=True).indices
        return cls(order, order.argsort())

    def pack(self, rows: Tensor) -> Tensor:
        """Rows (the first dimension) of the text, as they are stored."""
        return rows[self.order]

    def unpack(self, stored: Tensor) -> Tensor:
        """Stored rows as the text goes."""
        return stored[self.mapping]

    def stored(self, rows: Tensor, start: int = 0) -> Tensor:
        """Where rows of a view of the extent that begins at row `start` are stored. Rows of the extent before and beyond
        the view are in the same chunks, and never among them."""
        return self.mapping[start + rows]

    def same_chunks(self, other: Order, chunk: int) -> bool:
        """Whether every row stays in its chunk: then rewriting gains nothing, as chunks are read whole."""
        return bool((self.mapping // chunk == other.mapping // chunk).all())
