"""Attention over cached context: what the engine passes to the decoder as its `Attend`.

For each layer, in this order: project, tee the new un-rotated rows to the saver, rotate, bring in the layer's
cached rows (waiting for that layer only: CachedAttention §3.2.1, layer-wise pre-loading), attend.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from afterglow.engine.gather import Gatherer, Part
from afterglow.engine.tee import Tee
from afterglow.kernels.attention import attend
from afterglow.kernels.rope import Rotation
from afterglow.model.decoder import Attention


class Beside(Protocol):
    """What attends for parts that `CachedAttend` leaves out."""

    def attend(self, layer: int, scale: float, q: Tensor, out: Tensor) -> None:
        """Fill in these parts' rows of `out` [rows, heads, head_dim]; `q`, the same of the whole step, is rotated, and the parts'
        new rows are in their contexts."""


class CachedAttend:
    """`Attend` for one step: exact attention of each part over its whole context.

    `beside`: set, it attends for the `parts` that are not among the `whole` ones.
    """

    def __init__(
        self, parts: list[Part], angles: Rotation | None, gatherer: Gatherer, tee: Tee, whole: list[Part] | None = None
    ) -> None:
        self.parts = parts
        self.whole = parts if whole is None else whole
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
        """The step's new rows [rows, kv_heads, head_dim] into their contexts."""
        for part in self.parts:
            if part.failed is None:
                part.context.keys(layer)[part.start : part.stop] = k[part.where]
                part.context.values(layer)[part.start : part.stop] = v[part.where]

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        """All rows of the step over their contexts, which are on the device: [rows, heads, head_dim]."""
        out = torch.empty_like(q)
        for part in self.whole:
            if part.failed is not None:
                out[part.where] = 0  # void, but it must not become NaN: the forward goes on for the others
                continue
            keys, values = part.context.keys(layer), part.context.values(layer)
            out[part.where] = self._attended(
                part, q[part.where], keys[: part.stop], values[: part.stop], attention.scale
            )
        return out

    def _attended(self, part: Part, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """One part's new rows over its whole context, in one layer."""
        return attend(q, keys, values, scale=scale, causal=True)[0]
