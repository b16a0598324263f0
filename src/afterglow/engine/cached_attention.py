"""Attend over cached context: the `Attend` that the engine passes to the decoder.

For each layer, in this order: project, tee the new un-rotated rows to the saver, rotate, bring in the layer's
cached rows (waiting for that layer only: CachedAttention §3.2.1, layer-wise pre-loading), attend.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from afterglow.engine.gather import BatchEntry, Gatherer
from afterglow.engine.tee import Tee
from afterglow.kernels.decode import DECODED
from afterglow.kernels.rope import LayerRotations
from afterglow.model.decoder import Attention


class Beside(Protocol):
    """Attend for entries that `CachedAttend` leaves out."""

    def attend(self, layer: int, scale: float, q: Tensor, out: Tensor) -> None:
        """Fill in these entries' rows of `out` [rows, heads, head_dim]. `q`, of the same shape, is rotated; new keys and values
        are in the entries' contexts."""


class CachedAttend:
    """Attend exactly, each entry over its whole context. An `Attend` for one step.

    `beside`, if it is set, attends for the `entries` that are not in `whole`.
    """

    def __init__(
        self,
        entries: list[BatchEntry],
        angles: LayerRotations | None,
        gatherer: Gatherer,
        tee: Tee,
        whole: list[BatchEntry] | None = None,
    ) -> None:
        self.entries = entries
        self.whole = entries if whole is None else whole
        self.beside: Beside | None = None
        self._angles = angles
        self._gatherer = gatherer
        self._tee = tee

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        self._tee.layer(layer, k, v)
        q, k = attention.rotate_both(q, k, self._angles)
        self._gatherer.layer(layer)
        self._append(layer, k, v)
        out = self._attention(layer, attention, q)
        if self.beside is not None:
            self.beside.attend(layer, attention.scale, q, out)
        self._gatherer.computed(layer)
        return out.flatten(1)

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy the step's new rows [rows, kv_heads, head_dim] to their contexts."""
        for entry in self.entries:
            if entry.failed is None:
                entry.context.keys(layer, entry.start, entry.stop)[:] = k[entry.where]
                entry.context.values(layer, entry.start, entry.stop)[:] = v[entry.where]

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        """Attend with all rows of the step to their contexts on the device: [rows, heads, head_dim]."""
        out = torch.empty_like(q)
        for entry in self.whole:
            if entry.failed is not None:
                out[entry.where] = 0  # void, but it must not become NaN: the forward goes on for the others
                continue
            first = entry.context.group_of(layer).first
            keys, values = (rows(layer, first, entry.stop) for rows in (entry.context.keys, entry.context.values))
            out[entry.where] = self._attended(entry, attention, q[entry.where], keys, values)
        return out

    def _attended(self, entry: BatchEntry, attention: Attention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with one entry's new rows to all rows of its context that one layer holds."""
        if not 1 < len(q) <= DECODED or q.device.type != "cpu":
            return attention.attend(q, keys, values)
        # Query by query: what each is rounded to does not depend on the others.
        first = len(keys) - len(q) + 1
        each = [attention.attend(q[at : at + 1], keys[: first + at], values[: first + at]) for at in range(len(q))]
        return torch.cat(each)
