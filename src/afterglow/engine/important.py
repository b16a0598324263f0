"""Requests that take only what is important of their cached prefix: SPEC, as an `Attend` (§IV; spec S1-S8, S16, S17).

What a layer selects while the prompt is computed is what the request attends to, at the positions that the rows had: until
it ends, as in the paper (S17), or until the tokens that it decodes are asked in turn (`--importance-renew`; a fact that a
reply retrieves is found by the reply's own attention). None of this is exact, so nothing of it is ever stored (spec X3);
requests beside it are computed as always.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from afterglow.engine.attend import CachedAttend
from afterglow.engine.gather import Gatherer, Part
from afterglow.engine.tee import Tee
from afterglow.importance.held import Held, Pair
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
from afterglow.importance.loader import Loader, Lost
from afterglow.importance.prefix import Prefix
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.rope import Rotation, rotate
from afterglow.model.decoder import Attention, Decoder
from afterglow.plan.step import Selectable
from afterglow.request import Selected
from afterglow.store.layout import KEYS, VALUES


class Important:
    """What all such requests of an engine share."""

    def __init__(self, decoder: Decoder, loader: Loader, rules: Rules, renew: int = 0) -> None:
        """`renew`: tokens after which those that are being decoded select anew; 0: what the prompt selected stays."""
        self.decoder, self.loader, self.rules, self.renew = decoder, loader, rules, renew
        self.probes = probes_of(decoder.spec.heads, decoder.spec.kv_heads, rules.probe_heads)

    def begin(self, selectable: tuple[Selectable, ...], retention: float | None, exact: int = 0) -> Taking:
        """A request's prefix, of which it takes a share of `retention` (None: the usual one), and all of its first `exact`
        rows. Errors: `Lost`."""
        rules = self.rules if retention is None else replace(self.rules, retention=retention)
        return Taking(self, Prefix(self.loader, selectable), rules, exact)


@dataclass(slots=True)
class Taking:
    """One request: what its layers have taken of the prefix. `kept`: rotated keys, and values, [rows, kv_heads, head_dim]."""

    shared: Important
    prefix: Prefix
    rules: Rules
    exact: int = 0
    kept: list[Pair] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    renewals: int = 0  # times that all layers were asked anew
    _held: list[Held | None] = field(default_factory=list)  # by layer; None where all rows are attended to
    _rotation: Rotation | None = None
    _since: int = 0  # tokens decoded since they were last asked
    _asking: bool = False
    _stuck: bool = False  # the rest of the prefix cannot be read any more

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
        taken = [self.rows if held is None else int(held.ever.sum()) for held in self._held]
        return Selected(
            self.rows, kept, layers, layers - similar - whole, sum(taken) / layers if taken else kept, self.renewals
        )

    def layer(self, layer: int, q: Tensor, own: Tensor, scale: float, room: Pair) -> Pair:
        """What the layer attends to besides the request's own rows. `q` [new, heads, head_dim] and `own` [those and the ones
        before, kv_heads, head_dim], rotated, are asked when the prompt is computed, and then as often as the engine renews.
        `room`: memory for keys and values of the prefix's rows in this layer, [rows, kv_heads, head_dim], the same each time.
        Errors: `Lost`, of the prompt; later the layer goes on with what it has."""
        if layer < len(self.kept):
            if layer == 0:
                self._count(len(q))
            if self._asking:
                self._renew(layer, q, own, scale, room)
            held = self._held[layer] if self._held else None
            return room if held is not None and held.whole else self.kept[layer]
        selection, keys, probe_keys = self._select(layer, q, own, scale)
        rotated, values = self.prefix.take(layer, selection, keys)
        rotated, values = rotated.to(q.device), values.to(q.device)
        if keys is None:
            rotated = self._rotate(rotated, selection.rows)
        self.kept.append((rotated, values))
        self.selections.append(selection)
        if self.shared.renew:
            self._hold(selection, probe_keys, keys, room)
        self.prefix.ahead(layer, selection)
        if layer + 1 == self.shared.decoder.spec.layers:
            self.prefix.close()
        return self.kept[layer]

    def _hold(self, selection: Selection, probe_keys: Tensor | None, keys: Tensor | None, room: Pair) -> None:
        """Remember what has been loaded, for the tokens to come."""
        if selection.kind == "all" or probe_keys is None:
            self._held.append(None)
            return
        held = Held(*room)
        held.begin(selection, self.kept[-1])
        held.put_keys(slice(None), probe_keys if keys is None else keys)
        self.kept[-1] = held.kept
        self._held.append(held)

    def _count(self, tokens: int) -> None:
        """Tokens have been decoded: are they to be asked?"""
        self._since += tokens
        self._asking = bool(
            self.shared.renew and self._since >= self.shared.renew and not self._stuck and any(self._held)
        )
        if self._asking:
            self._since = 0
            self.renewals += 1

    def _renew(self, layer: int, q: Tensor, own: Tensor, scale: float, room: Pair) -> None:
        """Let the tokens that are being decoded select. What they want is known afterwards, or the layer stays as it is."""
        held, stats = self._held[layer], self.shared.loader.stats
        if held is None or held.whole or self._stuck:
            return
        held.keys, held.values = room  # the context may have grown, and moved
        try:
            selection = self._select_again(held, layer, q, own, scale)
            wanted = selection.wanted()
            self._know_keys(held, layer, held.without_keys(wanted))
            if len(missing := held.without_values(wanted)):
                rows, values = self.prefix.more(layer, VALUES, missing)
                held.put_values(rows.to(q.device), values.to(q.device))
        except Lost:
            self._stuck = True
            stats.failed_renewals += 1
            return
        held.renew(selection)
        self.selections[layer] = selection
        stats.renewals += 1

    def _know_keys(self, held: Held, layer: int, missing: Tensor) -> None:
        """Errors: `Lost`."""
        if len(missing):
            rows, keys = self.prefix.more(layer, KEYS, missing)
            rows = rows.to(held.keys.device)
            held.put_keys(rows, self._rotate(keys.to(held.keys.device), rows))

    def _select_again(self, held: Held, layer: int, q: Tensor, own: Tensor, scale: float) -> Selection:
        """What decoded tokens find important. Errors: `Lost`."""
        shared, rules, exact = self.shared, self.rules, self.exact
        k = rules.keep(self.prefix.rows - exact)
        assert k is not None, "all rows are taken"
        began, waited = time.perf_counter(), shared.loader.stats.waited
        voted = probe_sums(shared.probes, q, held.keys, own, scale=scale)
        verdict = judge(voted[:, exact:], k, rules)
        found = verdict.selection
        if found is None:
            self._know_keys(held, layer, held.without_keys())
            sums = all_sums(shared.probes, voted, q, held.keys, own, scale=scale)
            found = fall_back(sums[:, exact:], k, rules, verdict)
        shared.loader.stats.identifying += time.perf_counter() - began - (shared.loader.stats.waited - waited)
        return behind(found, exact)

    def _select(
        self, layer: int, q: Tensor, own: Tensor, scale: float
    ) -> tuple[Selection, Tensor | None, Tensor | None]:
        """What the layer finds important; all keys, and the probe heads', rotated, where they were needed for it."""
        shared, rules = self.shared, self.rules
        exact = self.exact
        k = rules.keep(self.prefix.rows - exact)
        if k is None:
            return everything(self.prefix.rows), None, None
        probe_keys = self._rotate(self.prefix.probe_keys(layer).to(q.device), None)
        began = time.perf_counter()
        voted = probe_sums(shared.probes, q, probe_keys, own, scale=scale)
        verdict = judge(voted[:, exact:], k, rules)
        shared.loader.stats.identifying += time.perf_counter() - began
        if verdict.selection is not None:
            return behind(verdict.selection, exact), None, probe_keys
        keys = self._rotate(self.prefix.all_keys(layer).to(q.device), None)
        began = time.perf_counter()
        sums = all_sums(shared.probes, voted, q, keys, own, scale=scale)
        found = behind(fall_back(sums[:, exact:], k, rules, verdict), exact)
        shared.loader.stats.identifying += time.perf_counter() - began
        return found, keys, probe_keys

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
                room = keys[: part.own_from], values[: part.own_from]
                try:
                    kept = taking.layer(layer, q[part.where], own[0], attention.scale, room)
                except Lost as lost:
                    part.failed = lost.extent
                    continue
                parts = [
                    attend(q[part.where], *kept, scale=attention.scale, causal=False),
                    attend(q[part.where], *own, scale=attention.scale, causal=True),
                ]
                out[part.where] = merge(parts)[0]
        return out
