"""Prefill and decode of one request over the important rows of a prefix that is in memory as a whole.

No I/O: this shows what a selection does to answers (SPEC, Figures 4, 8, 11, 15, 19, 22), and is what an `Attend` that loads
rows must agree with. Rows keep the positions that they had, for a new token has one position while each layer, and each
head of a layer that fell back, selects rows of its own. What a layer selected while the prompt was computed is
what it attends to until the end, unless it is asked to `renew` that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from afterglow.importance.select import Queries, RowSelector, Selection, SelectionRules, probes_of
from afterglow.importance.sums import grouped, head_sums
from afterglow.importance.waits import at_hand, waited
from afterglow.kernels.attention import attend, merge
from afterglow.model.decoder import Attention, Decoder

Part = tuple[Tensor, Tensor]
LeftOut = Callable[[int, Tensor, Selection, float], Part]
"""A layer, queries, what was selected, the scale of scores -> output and log-sum-exp."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Keys and values of tokens at positions 0, 1, ..., by layer: [rows, kv_heads, head_dim]. `turned`: whether rotary
    positions have been applied to the keys (models with learned positions have them in their hidden rows)."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    turned: bool = False

    def __len__(self) -> int:
        return len(self.keys[0])

    def turn(self, decoder: Decoder) -> Prefix:
        """The same with positions applied."""
        rotation = None if self.turned else decoder.rotation(torch.arange(len(self), device=decoder.device))
        if rotation is None:
            return Prefix(self.keys, self.values, True)
        keys = tuple(layer.attention.rotate(k, rotation) for layer, k in zip(decoder.layers, self.keys, strict=True))
        return Prefix(keys, self.values, True)


def prefill(decoder: Decoder, ids: Sequence[int]) -> Prefix:
    """Compute a prefix: its keys are not turned."""
    collect = _Collect(decoder, len(ids))
    positions = torch.arange(len(ids), device=decoder.device)
    decoder.forward(torch.tensor(ids, device=decoder.device), positions, collect)
    return Prefix(tuple(collect.keys), tuple(collect.values))


class _Collect:
    """Plain causal attention that remembers keys and values."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self._rotation = decoder.rotation(torch.arange(rows, device=decoder.device))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        self.keys.append(k.clone())
        self.values.append(v.clone())
        q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
        return attend(q, k, v, scale=attention.scale, causal=True)[0].flatten(1)


class SelectingAttend:
    """`Attend` of one request: the important rows of a prefix, and all new tokens.

    `selections`: what each layer selected, once the first tokens were computed. `renew`: are the next ones asked? `sums`: with `observe`, each layer's
    column sums float32 [kv_heads, rows] of all heads, whatever the selection needed.
    """

    def __init__(
        self,
        decoder: Decoder,
        prefix: Prefix,
        rules: SelectionRules,
        *,
        fixed: Sequence[Tensor] | None = None,
        system: int = 0,
        renew: bool = False,
        observe: bool = False,
        left_out: LeftOut | None = None,
    ) -> None:
        """`fixed`: rows that each layer attends to without looking, int64 [k] or [kv_heads, k], instead of `rules`.
        `system`: the prefix's first rows that are always attended to, and not among those that are selected from (spec
        X8); rows are counted from there on. `renew`: select anew for whatever is decoded, by its own attention, in layers
        that have not taken all rows (not in SPEC, whose decoding stays with what the prompt selected). `left_out`: attends to what
        was not selected. Give a prefix that has been turned where it serves many requests."""
        if not 0 <= system <= len(prefix):
            raise ValueError(f"a system prompt of {system} rows is not in a prefix of {len(prefix)}")
        spec = decoder.spec
        if not spec.plain_scores:
            raise ValueError(f"a model of type {spec.family} has windows, caps or sinks, which selections do not know")
        self._decoder, self._prefix = decoder, prefix.turn(decoder)
        self._fixed, self._system, self._observe, self._left_out = fixed, system, observe, left_out
        self.renew = renew
        probes = probes_of(spec.heads, spec.kv_heads, rules.probe_heads)
        self._selector = RowSelector(probes, rules)
        self._rotation = decoder.rotation(torch.empty(0, dtype=torch.int64, device=decoder.device))
        self._kept: list[Part] = []
        self.own: list[Part] = []
        self._length = len(prefix)
        self.selections: list[Selection] = []
        self.sums: list[Tensor] = []

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Final hidden rows [tokens, hidden] of the next tokens. The first call's are those that the selection goes by:
        the prompt; later ones are decoded, one by one or several at a time."""
        positions = torch.arange(self._length, self._length + len(ids), device=self._decoder.device)
        self._rotation = self._decoder.rotation(positions)
        self._length += len(ids)
        return self._decoder.forward(torch.tensor(ids, device=self._decoder.device), positions, self)

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        """See `Attend`."""
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
        scale, parts = attention.scale, []
        if self._system:
            keys, values = self._prefix.keys[layer], self._prefix.values[layer]
            parts.append(attend(q, keys[: self._system], values[: self._system], scale=scale, causal=False))
        first = layer == len(self.own)
        if first:
            self.own.append((k, v))
        else:
            own = self.own[layer]
            self.own[layer] = (torch.cat((own[0], k)), torch.cat((own[1], v)))
        if first or (self.renew and self.selections[layer].kind != "all"):
            selection = self._select(layer, q, self.own[layer][0], scale, parts[0][1] if parts else None)
            kept = self._rows(layer, selection)
            self.selections[layer : layer + 1] = [selection]
            self._kept[layer : layer + 1] = [kept]
        parts.append(attend(q, *self._kept[layer], scale=scale, causal=False))
        parts.append(attend(q, *self.own[layer], scale=scale, causal=True))
        if self._left_out is not None and self.selections[layer].kind != "all":
            parts.append(self._left_out(layer, q, self.selections[layer], scale))
        return merge(parts)[0].flatten(1)

    def _select(self, layer: int, q: Tensor, own: Tensor, scale: float, extra_lse: Tensor | None) -> Selection:
        keys = self._prefix.keys[layer][self._system :]
        if self._observe:
            sums = head_sums(q, keys, own, scale=scale, extra_lse=extra_lse)
            self.sums[layer:] = [grouped(sums, self._selector.probes.all_kv_heads)]
        if self._fixed is not None:
            rows = self._fixed[layer]
            chosen = torch.zeros(len(keys), dtype=torch.bool, device=rows.device)
            chosen[rows.flatten()] = True
            return Selection("shared" if rows.ndim == 1 else "per_head", len(keys), rows, chosen.nonzero().squeeze(1))
        queries = Queries(layer, q, own, scale, extra_lse)
        return waited(self._selector.select(len(keys), queries, lambda: at_hand(keys), lambda: at_hand(keys)), 0)

    def _rows(self, layer: int, selection: Selection) -> Part:
        """Dense copies of the selected rows [k, kv_heads, head_dim]; each KV head's may be other ones."""
        keys, values = (t[layer][self._system :] for t in (self._prefix.keys, self._prefix.values))
        if selection.kind == "all":
            return keys, values
        if selection.kind == "shared":
            return keys[selection.rows], values[selection.rows]
        heads = torch.arange(keys.shape[1], device=keys.device)
        rows = selection.rows.T
        return keys[rows, heads], values[rows, heads]
