"""`Attend` with attention maps: one hands them out, one computes with maps of other sentences (AttnCache, algorithm 2).

Neither keeps keys: nothing that passes through here may be decoded from, or stored as KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afterglow.kernels.stored_maps import apply_stored
from afterglow.memo.database import Fetched, MemoDatabase
from afterglow.memo.packing import unpack
from afterglow.model.decoder import Attention
from afterglow.model.encoder import BatchAttend, Model, attend_whole, runs

Bools = NDArray[np.bool_]
FEW = 1 << 14  # numbers of a sentence's context, below which a copy for each sentence costs more than it saves


def by_sentence(rows: Tensor, count: int, length: int) -> Tensor:
    """`rows` [count * length, ...] of a run of equal lengths -> [count, length, ...], a view."""
    return rows.view(count, length, *rows.shape[1:])


def attention_maps(q: Tensor, k: Tensor, *, scale: float, causal: bool) -> Tensor:
    """`q` [n, s, heads, head_dim] and `k` [n, s, kv_heads, head_dim], rotated -> float32 [n, heads, s, s]."""
    n, s, heads, _ = q.shape
    grouped = q.float().transpose(1, 2).view(n, k.shape[2], -1, s, q.shape[3])
    scores: Tensor = grouped @ k.float().permute(0, 2, 3, 1)[:, :, None] * scale
    if causal:
        scores.masked_fill_(torch.ones(s, s, dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    return scores.softmax(-1).view(n, heads, s, s)


def apply_maps(maps: Tensor, v: Tensor) -> Tensor:
    """`maps` [n, heads, s, s], `v` [n, s, kv_heads, head_dim] -> context [n * s, heads * head_dim] in v's dtype."""
    return mapped(maps, v).transpose(1, 2).reshape(maps.shape[0] * maps.shape[2], -1)


def mapped(maps: Tensor, v: Tensor) -> Tensor:
    """As `apply_maps`, head by head: [n, heads, s, head_dim]."""
    n, heads, s, _ = maps.shape
    kv_heads = v.shape[2]
    grouped = maps.to(v.dtype).reshape(n, kv_heads, heads // kv_heads * s, s)
    context: Tensor = grouped @ v.transpose(1, 2)
    return context.view(n, heads, s, -1)


class RecordingAttend:
    """Exact attention that keeps every layer's maps, and the layers' inputs."""

    def __init__(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> None:
        """A flat batch, as for `BatchAttend`."""
        self._rotation, self._causal = model.rotation(positions), model.spec.causal
        self._runs = runs(lengths)
        self.inputs: list[Tensor] = []
        """Of each layer, [tokens, hidden]; of layer 0 it is what sentences are found by."""
        self.maps: list[list[Tensor]] = [[] for _ in self._runs]
        """For each run of equal lengths and each layer, float32 [sentences, heads, s, s]."""

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        assert layer == len(self.inputs)
        self.inputs.append(x.clone())
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
        out, start = [], 0
        for maps, (count, length) in zip(self.maps, self._runs, strict=True):
            where = slice(start, start := start + count * length)
            parts = [by_sentence(t[where], count, length) for t in (q, k, v)]
            maps.append(attention_maps(parts[0], parts[1], scale=attention.scale, causal=self._causal))
            out.append(apply_maps(maps[-1], parts[2]))
        return torch.cat(out)

    def sentences(self) -> list[Tensor]:
        """The maps of each sentence in order, float32 [layers, heads, s, s]."""
        return [maps for run in self.maps for maps in torch.stack(run, 1)]


@dataclass(frozen=True, slots=True)
class SentenceGroup:
    """The sentences of one run that have maps for a layer, or those that have none: `members` of the run, the whole run where
    `whole`. The run's rows begin at `start`; its `count` sentences have `length` tokens each."""

    run: int
    members: Tensor
    whole: bool
    start: int
    count: int
    length: int

    def put(self, out: Tensor, found: Tensor) -> None:
        """`found` [members, heads, length, head_dim] to its rows of `out` [tokens, heads, head_dim]."""
        stop = self.start + self.count * self.length
        place, rows = by_sentence(out[self.start : stop], self.count, self.length), found.transpose(1, 2)
        if self.whole:
            place.copy_(rows)
        elif rows[0].numel() < FEW:
            place[self.members] = rows
        else:  # twice as fast as picking rows by their numbers
            for number, member in enumerate(self.members.tolist()):
                place[member].copy_(rows[number])


class Split:
    """A flat batch in two: sentences that have a map, and the others. `None` for rows means all rows."""

    def __init__(self, model: Model, positions: Tensor, lengths: Sequence[int], hits: Bools) -> None:
        """`hits` [sequences]."""
        where = np.repeat(hits, lengths)
        self.any, everything = bool(hits.any()), bool(hits.all())
        self.hits = None if everything else torch.from_numpy(np.flatnonzero(where)).to(positions.device)
        self.misses = torch.from_numpy(np.flatnonzero(~where)).to(positions.device)
        self.rotation = None if everything else model.rotation(positions[self.misses])
        self.plain = None if self.any else BatchAttend(model, positions, lengths)
        self.hit_groups, self.missed_groups = list(groups(lengths, hits)), list(groups(lengths, ~hits))


def groups(lengths: Sequence[int], chosen: Bools) -> Iterator[SentenceGroup]:
    """The `chosen` [sequences] of each run that has any."""
    first, start = 0, 0
    for run, (count, length) in enumerate(runs(lengths)):
        members = np.flatnonzero(chosen[first : first + count])
        if len(members):
            yield SentenceGroup(run, torch.from_numpy(members), len(members) == count, start, count, length)
        first, start = first + count, start + count * length


class MapsAttend:
    """Attention by maps that are at hand, for those sentences and layers that have them; exact for the others."""

    def __init__(
        self, model: Model, positions: Tensor, lengths: Sequence[int], memo: AttentionMemo | None = None
    ) -> None:
        """A flat batch, as for `BatchAttend`; nothing has a map until `use`, or until the `memo` has looked the sentences up by their
        embedded input, which layer 0 is given."""
        self._source = memo
        self._model, self._positions, self._lengths = model, positions, lengths
        self._causal = model.spec.causal
        self._maps: list[Fetched] = []
        self.layers: Bools = np.zeros((len(lengths), model.spec.layers), bool)
        """For each sentence, in which layers it used a map."""
        self._splits: dict[bytes, Split] = {}

    def use(self, maps: list[Fetched], layers: Bools) -> None:
        """`maps` of each run's sentences; those that `layers` [sentences, layers] names are taken."""
        self._maps, self.layers = maps, layers

    @property
    def hits(self) -> list[bool]:
        """For each sentence, whether it used maps at all."""
        return [bool(layers.any()) for layers in self.layers]

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        if layer == 0 and self._source is not None:
            self.use(*self._source.find(x, self._lengths))
        split = self._split(self.layers[:, layer])
        if split.plain is not None:
            return split.plain(layer, attention, x)
        # Every sentence's context goes straight to its place: with weights of 8 bits, copies of rows are a tenth of all.
        out = x.new_empty(x.shape[0], attention.heads, attention.head_dim)
        v = attention.value(x if split.hits is None else x.index_select(0, split.hits))
        start = 0
        for group in split.hit_groups:
            count = len(group.members)
            values = by_sentence(v[start : (start := start + count * group.length)], count, group.length)
            self._apply(group, layer, values, out)
        if split.missed_groups:
            self._exact(split, attention, x.index_select(0, split.misses), out)
        return out.flatten(1)

    def _exact(self, split: Split, attention: Attention, x: Tensor, out: Tensor) -> None:
        """Attention of the missed sentences, whose rows `x` are, to their places in `out`."""
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, split.rotation), attention.rotate(k, split.rotation)
        start = 0
        for group in split.missed_groups:
            count = len(group.members)
            where = slice(start, start := start + count * group.length)
            queries, keys, values = (by_sentence(t[where], count, group.length).transpose(1, 2) for t in (q, k, v))
            group.put(out, attend_whole(attention, queries, keys, values, causal=self._causal))

    def _apply(self, group: SentenceGroup, layer: int, values: Tensor, out: Tensor) -> None:
        """Maps of a group's sentences times `values` [members, length, kv_heads, head_dim], to their places in `out`."""
        fetched, members = self._maps[group.run], group.members.numpy()
        stored = fetched.stored(layer, members, group.length, causal=self._causal)
        if not apply_stored(stored, values, group.start + members * group.length, out):
            maps = unpack(fetched.layer(layer, members), group.length, causal=self._causal)
            group.put(out, mapped(maps.to(values.device), values))

    def _split(self, hits: Bools) -> Split:
        key = hits.tobytes()
        if key not in self._splits:
            self._splits[key] = Split(self._model, self._positions, self._lengths, hits)
        return self._splits[key]


class AttentionMemo:
    """A database of attention maps in use: what an `Embedder` is given. May be used from several threads."""

    def __init__(self, database: MemoDatabase, threshold: float) -> None:
        """`threshold`: the least similarity at which maps are used (see `MemoDatabase.find`)."""
        self.database, self.threshold = database, threshold

    def attend(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> MapsAttend:
        """See `Memo.attend`. Raises: DamageError where the maps have another shape than the model's."""
        self.database.check(model.spec)
        return MapsAttend(model, positions, lengths, self)

    def find(self, x: Tensor, lengths: Sequence[int]) -> tuple[list[Fetched], Bools]:
        """`x` [tokens, hidden], embedded inputs of a flat batch -> maps for each run, and [sentences, layers]: in which
        layers they are to be used."""
        fetched, layers, start = [], [], 0
        for count, length in runs(lengths):
            inputs = by_sentence(x[start : (start := start + count * length)], count, length)
            found = self.database.find(inputs, self.threshold)
            fetched.append(self.database.fetch(found))
            layers.append(found.layers)
        return fetched, np.concatenate(layers)
