"""Requests that take only what is important of their cached prefix: SPEC, as an `Attend` (§IV; spec S1-S8, S16, S17).

What a layer selects while the prompt is computed is what the request attends to until it ends, at the positions that the
rows had. None of this is exact, so nothing of it is ever stored (spec X3); requests beside it are computed as always.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from afterglow.engine.attend import CachedAttend
from afterglow.engine.gather import Gatherer, Part
from afterglow.engine.tee import Tee
from afterglow.importance.identify import (
    Rules,
    Selection,
    all_sums,
    behind,
    everything,
    fall_back,
    judge,
    probe_sums,
    probes_of,
)
from afterglow.importance.loader import Loader, Lost, Prefix
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.rope import Rotation, rotate
from afterglow.model.decoder import Attention, Decoder
from afterglow.plan.step import Selectable
from afterglow.request import Selected

Pair = tuple[Tensor, Tensor]


class Important:
    """What all such requests of an engine share."""

    def __init__(self, decoder: Decoder, loader: Loader, rules: Rules) -> None:
        self.decoder, self.loader, self.rules = decoder, loader, rules
        self.probes = probes_of(decoder.spec.heads, decoder.spec.kv_heads, rules.probe_heads)

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> Taking:
        """A request's prefix, of which it takes a share of `retention` (None: the usual one), and all of its first `exact`
        rows. Errors: `Lost`."""
        rules = self.rules if retention is None else replace(self.rules, retention=retention)
        return Taking(self, self.loader.open(selectable), rules, exact)


@dataclass(slots=True)
class Taking:
    """One request: what its layers have taken of the prefix. `kept`: rotated keys, and values, [rows, kv_heads, head_dim]."""

    shared: Important
    prefix: Prefix
    rules: Rules
    exact: int = 0
    kept: list[Pair] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    _rotation: Rotation | None = None

    def __post_init__(self) -> None:
        decoder = self.shared.decoder
        self._rotation = decoder.rotation(torch.arange(self.prefix.rows, device=decoder.device))

    @property
    def rows(self) -> int:
        """Of the prefix, taken or not: the request's own rows come behind them."""
        return self.prefix.rows

    def summary(self) -> Selected:
        """For the caller, once the prompt has been computed."""
        layers = len(self.selections)
        kept = sum(selection.kept for selection in self.selections) / max(1, layers)
        similar = sum(selection.kind == "shared" for selection in self.selections)
        whole = sum(selection.similarity is None for selection in self.selections)
        return Selected(self.rows, kept, layers, layers - similar - whole)

    def layer(self, layer: int, q: Tensor, own: Tensor, scale: float) -> Pair:
        """What the layer attends to besides the request's own rows. `q` [new, heads, head_dim] and `own` [new, kv_heads,
        head_dim], rotated, are asked once, when the prompt is computed. Errors: `Lost`."""
        if layer < len(self.kept):
            return self.kept[layer]
        selection, keys = self._select(layer, q, own, scale)
        rotated, values = self.prefix.take(layer, selection, keys)
        rotated, values = rotated.to(q.device), values.to(q.device)
        if keys is None:
            rotated = self._rotate(rotated, selection.rows)
        self.kept.append((rotated, values))
        self.selections.append(selection)
        self.prefix.ahead(layer, selection)
        if layer + 1 == self.shared.decoder.spec.layers:
            self.prefix.close()
        return self.kept[layer]

    def _select(self, layer: int, q: Tensor, own: Tensor, scale: float) -> tuple[Selection, Tensor | None]:
        """What the layer finds important, and all keys where they were needed for it."""
        shared, rules = self.shared, self.rules
        exact = self.exact
        k = rules.keep(self.prefix.rows - exact)
        if k is None:
            return everything(self.prefix.rows), None
        probe_keys = self._rotate(self.prefix.probe_keys(layer).to(q.device), None)
        began = time.perf_counter()
        voted = probe_sums(shared.probes, q, probe_keys, own, scale=scale)
        verdict = judge(voted[:, exact:], k, rules)
        shared.loader.stats.identifying += time.perf_counter() - began
        if verdict.selection is not None:
            return behind(verdict.selection, exact), None
        keys = self._rotate(self.prefix.all_keys(layer).to(q.device), None)
        began = time.perf_counter()
        sums = all_sums(shared.probes, voted, q, keys, own, scale=scale)
        found = behind(fall_back(sums[:, exact:], k, rules, verdict), exact)
        shared.loader.stats.identifying += time.perf_counter() - began
        return found, keys

    def _rotate(self, keys: Tensor, rows: Tensor | None) -> Tensor:
        """Keys of rows of the prefix (None: all), at the positions that these have."""
        if self._rotation is None:
            return keys
        cos, sin = self._rotation
        return rotate(keys, (cos, sin) if rows is None else (cos[rows], sin[rows]))


class ImportantAttend(CachedAttend):
    """`Attend` for one step in which some parts take only what is important of their prefix."""

    def __init__(
        self, parts: list[Part], angles: Rotation | None, gatherer: Gatherer, tee: Tee, takings: dict[int, Taking]
    ) -> None:
        """`takings` by job; all other parts have the whole of their context on the device."""
        super().__init__(parts, angles, gatherer, tee)
        self._takings = takings
        for part in parts:
            if part.job in takings:
                part.own_from = takings[part.job].rows

    def _attention(self, layer: int, attention: Attention, q: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for part in self.parts:
            keys, values = part.context.keys(layer), part.context.values(layer)
            taking = self._takings.get(part.job)
            if taking is None and part.failed is None:
                whole = keys[: part.stop], values[: part.stop]
                out[part.where] = self._attended(part, q[part.where], *whole, attention.scale)
            elif taking is not None and part.failed is None:
                own = keys[part.own_from : part.stop], values[part.own_from : part.stop]
                try:
                    kept = taking.layer(layer, q[part.where], own[0], attention.scale)
                except Lost as lost:
                    part.failed = lost.extent
                    continue
                parts = [
                    attend(q[part.where], *kept, scale=attention.scale, causal=False),
                    attend(q[part.where], *own, scale=attention.scale, causal=True),
                ]
                out[part.where] = merge(parts)[0]
        return out
