"""What AttnCache is compared with, over the same models and the same `Attend`: maps shared between layers (LazyFormer,
SAN), searched anew in every layer (AttnCache-f), means of all maps (does looking up help?), and layers or their attention left out
(Table 2)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from afterglow.errors import DamageError
from afterglow.memo.build import record
from afterglow.memo.database import Fetched, Found, MemoDatabase, Record
from afterglow.memo.map_attention import (
    AttentionMemo,
    Bools,
    MapsAttend,
    RecordingAttend,
    apply_maps,
    attention_maps,
    by_sentence,
)
from afterglow.memo.maps import MapStore, token_key
from afterglow.memo.options import STEPS, LabelMode, ProjectorKind
from afterglow.memo.packing import unpack
from afterglow.memo.projector import Projector, ProjectorSpec
from afterglow.memo.sequence_embedder import Embedder
from afterglow.memo.training import buckets_of, train
from afterglow.memo.vector_index import VectorIndex
from afterglow.model.decoder import Attend, Attention, Decoder
from afterglow.model.encoder import BatchAttend, Model, runs
from afterglow.model.linear import Linear

LAZY_BLOCK = 2  # layers that share a map, the paper's setting
RECORDED = 32  # sentences of a pass that are recorded


class SharedAttend:
    """Each layer takes the maps of layer `sources[layer]` (itself: computes its own) within the same pass."""

    def __init__(self, sources: Sequence[int], model: Model, positions: Tensor, lengths: Sequence[int]) -> None:
        self._sources, self._rotation, self._causal = sources, model.rotation(positions), model.spec.causal
        self._needed = {source for layer, source in enumerate(sources) if source != layer}
        self._plain = BatchAttend(model, positions, lengths)
        self._runs = runs(lengths)
        self._maps: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        source = self._sources[layer]
        if source == layer and layer not in self._needed:
            return self._plain(layer, attention, x)
        out, start = [], 0
        if source == layer:
            q, k, v = attention.project(x)
            q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
            self._maps[layer] = []
        else:
            v = attention.value(x)
        for run, (count, length) in enumerate(self._runs):
            where = slice(start, start := start + count * length)
            if source == layer:
                parts = [by_sentence(t[where], count, length) for t in (q, k)]
                self._maps[layer].append(attention_maps(*parts, scale=attention.scale, causal=self._causal))
            out.append(apply_maps(self._maps[source][run], by_sentence(v[where], count, length)))
        return torch.cat(out)


def lazyformer(layers: int, block: int = LAZY_BLOCK) -> list[int]:
    """Sources of LazyFormer: blocks of `block` layers share the maps of their first."""
    return [layer // block * block for layer in range(layers)]


def layer_similarity(recorded: Sequence[Tensor]) -> Tensor:
    """1 - Jensen-Shannon divergence (base 2) between the maps of all pairs of layers, mean over sentences, heads and rows.

    `recorded`: [layers, heads, s, s] of each sentence. Returns float64 [layers, layers].
    """
    layers = recorded[0].shape[0]
    total = torch.zeros(layers, layers, dtype=torch.float64)
    for maps in recorded:
        for first in range(layers):
            for other in range(first + 1, layers):
                a, b = maps[first].double(), maps[other].double()
                mean = (a + b) / 2
                total[first, other] += float((_entropy(mean) - (_entropy(a) + _entropy(b)) / 2).mean())
    return 1 - (total + total.T) / len(recorded)


def _entropy(rows: Tensor) -> Tensor:
    bits: Tensor = torch.special.entr(rows).sum(-1) / np.log(2)
    return bits


def san(similarity: Tensor, threshold: float) -> list[int]:
    """Sources of SAN: a layer joins the block before it while its similarity to that block's first is `threshold` or
    more."""
    sources = [0]
    for layer in range(1, len(similarity)):
        first = sources[-1]
        sources.append(first if float(similarity[first, layer]) >= threshold else layer)
    return sources


def san_sharing(similarity: Tensor, shared: int) -> list[int]:
    """Choose SAN's sharing at the highest threshold at which `shared` layers or more take another's maps."""
    levels = sorted({float(s) for s in similarity.flatten()}, reverse=True)
    for level in levels:
        sources = san(similarity, level)
        if sum(source != layer for layer, source in enumerate(sources)) >= shared:
            return sources
    return [0] * len(similarity)


class LayerMemo:
    """AttnCache-f: in each layer, its own projector finds the maps of that layer by what the layer is given."""

    def __init__(self, store: MapStore, projectors: Sequence[Projector], indices: Sequence[VectorIndex]) -> None:
        """`store` holds the maps; of each layer a projector and the vectors of all records. See `build_layers`. No layer takes maps
        before `at`."""
        self.store, self._projectors, self._indices = store, projectors, indices
        self._thresholds: NDArray[np.float64] = np.full(len(projectors), np.inf)

    def at(self, thresholds: NDArray[np.float64]) -> LayerMemo:
        """Return the same memo with other `thresholds` [layers]: the least similarity at which each layer takes maps."""
        other = copy.copy(self)
        other._thresholds = thresholds
        return other

    def attend(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> LayerAttend:
        """See `Memo.attend`."""
        return LayerAttend(self, model, positions, lengths)

    def find(self, layer: int, inputs: Tensor) -> Found:
        """A layer's inputs [n, tokens, hidden] of sentences of one length -> their nearest."""
        distances, numbers = self._indices[layer].search(
            inputs.shape[1], self._projectors[layer].project(inputs).numpy()
        )
        nearest = distances[:, 0] if distances.shape[1] else np.full(len(inputs), np.inf, np.float32)
        similarity = 1 - nearest.astype(np.float64)
        taken = np.zeros((len(inputs), len(self._projectors)), bool)
        taken[:, layer] = similarity >= self._thresholds[layer]
        return Found(numbers, np.ones_like(distances), nearest, similarity, taken)


class LayerAttend(MapsAttend):
    """One pass of AttnCache-f."""

    def __init__(self, memo: LayerMemo, model: Model, positions: Tensor, lengths: Sequence[int]) -> None:
        super().__init__(model, positions, lengths)
        self._memo, self._runs = memo, runs(lengths)

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        fetched, taken, start = [], [], 0
        for count, length in self._runs:
            found = self._memo.find(layer, by_sentence(x[start : (start := start + count * length)], count, length))
            fetched.append(fetch_layer(self._memo.store, found, layer))
            taken.append(found.layers)
        layers = self.layers.copy()
        layers[:, layer] = np.concatenate(taken)[:, layer]
        self.use(fetched, layers)
        return super().__call__(layer, attention, x)


def build_layers(
    embedder: Embedder,
    store: MapStore,
    sentences: Sequence[Sequence[int]],
    *,
    kind: ProjectorKind = "binned",
    mode: LabelMode = "tv",
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LayerMemo:
    """AttnCache-f over `store`, whose records are the maps of `sentences`, in any order: a projector for each layer, trained without
    the length in its labels (AttnCache, 4.3). Raises: KeyError where a record is of another sentence."""
    by_key = {token_key(ids): ids for ids in sentences}
    sentences = list(map(by_key.__getitem__, store.keys()))
    layers, heads = store.identity.layers, store.identity.heads
    spec = ProjectorSpec(kind, embedder.model.spec.hidden, embedder.max_tokens)
    reduced: list[list[Tensor]] = [[] for _ in range(layers)]
    for start in range(0, len(sentences), RECORDED):
        batch = sentences[start : start + RECORDED]
        for layer, x in enumerate(record(embedder, batch).inputs):
            reduced[layer] += [spec.reduce(one[None])[0].half() for one in torch.split(x, [len(ids) for ids in batch])]
    projectors, indices = [], []
    for layer in range(layers):
        inputs = reduced[layer]

        def read_maps(number: int, chosen: np.ndarray, layer: int = layer) -> Tensor:
            packed = torch.from_numpy(store.read(number)[layer][chosen])
            return unpack(packed, int(store.tokens[number]), causal=store.identity.causal)[None]

        def read_input(number: int, inputs: list[Tensor] = inputs) -> Tensor:
            return inputs[number].float()

        projector = train(
            spec, store.tokens, heads, read_input, read_maps, mode=mode, length_term=False, steps=steps, seed=seed
        )
        index = VectorIndex()
        for tokens, members in buckets_of(store.tokens).items():
            with torch.inference_mode():
                index.put(tokens, members, projector(torch.stack([read_input(int(n)) for n in members])).numpy())
        projectors.append(projector)
        indices.append(index)
        progress(layer + 1, layers)
    return LayerMemo(store, projectors, indices)


def mean_maps(store: MapStore) -> dict[int, Record]:
    """Compute the mean of all maps of each number of tokens, packed: [layers, heads, numbers] in the store's dtype."""
    means = {}
    for tokens, members in buckets_of(store.tokens).items():
        total = sum(store.read(int(number)).astype(np.float32) for number in members)
        means[tokens] = np.asarray(total / len(members), store.read(int(members[0])).dtype)
    return means


class MeanMemo(AttentionMemo):
    """Where a sentence is found, all layers take the mean of all maps of as many tokens."""

    def __init__(self, means: dict[int, Record], database: MemoDatabase, threshold: float) -> None:
        super().__init__(database, threshold)
        self._means = means

    def find(self, x: Tensor, lengths: Sequence[int]) -> tuple[list[Fetched], Bools]:
        """See `AttentionMemo.find`."""
        fetched, layers = super().find(x, lengths)
        return [
            Fetched.own([self._means[length]] * count) if length in self._means else one
            for one, (count, length) in zip(fetched, runs(lengths), strict=True)
        ], layers


class DropAttend:
    """Attention left out of some layers: they add nothing but the output projection's bias (AttnDrop)."""

    def __init__(self, dropped: Sequence[int], plain: Attend) -> None:
        self._dropped, self._plain = frozenset(dropped), plain

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        if layer in self._dropped:
            return x.new_zeros(x.shape[0], attention.heads * attention.head_dim)
        return self._plain(layer, attention, x)


def without_layers(model: Model, dropped: Sequence[int]) -> Model:
    """The model without some of its layers, the weights shared (BlockDrop). Its spec still counts them."""
    left = copy.copy(model)
    left.layers = tuple(layer for index, layer in enumerate(model.layers) if index not in frozenset(dropped))
    return left


class _Kept:
    """A matrix that keeps what it yields."""

    def __init__(self, matrix: Linear) -> None:
        self._matrix, self.inputs, self.outputs = matrix, matrix.inputs, matrix.outputs
        self.last = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        found = self._matrix(x)
        self.last = found.clone()  # the residual is added in place
        return found

    def rows(self, start: int, stop: int) -> Linear:
        return self._matrix.rows(start, stop)


def redundancy(embedder: Embedder, sentences: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Measure for each layer how alike its input and its output are: mean cosine over all tokens, residual included,
    of its attention and of the whole layer. AttnDrop and BlockDrop leave out the layers that are most alike."""
    model = copy.copy(embedder.model)
    kept = [(_Kept(layer.out), _Kept(layer.dense.narrow)) for layer in model.layers]
    model.layers = tuple(
        dataclasses.replace(layer, out=out, mlp=dataclasses.replace(layer.dense, narrow=mlp_out))
        for layer, (out, mlp_out) in zip(model.layers, kept, strict=True)
    )
    attention = torch.zeros(len(kept), dtype=torch.float64)
    whole, tokens = attention.clone(), 0
    for ids in sentences:
        positions = torch.arange(len(ids), device=model.device)
        seen = _Inputs(BatchAttend(model, positions, [len(ids)]))
        with torch.inference_mode():
            model.forward(torch.tensor(ids, device=model.device), positions, seen)
            x = model._embed(torch.tensor(ids, device=model.device), model.dtype)
            if isinstance(model, Decoder) and model._positions is not None:
                x = x + F.embedding(positions + model.spec.position_offset, model._positions)
            for index, (layer, (out, mlp_out)) in enumerate(zip(model.layers, kept, strict=True)):
                if isinstance(model, Decoder):  # norms before the parts: what goes from layer to layer is a sum
                    middle = x + out.last
                    end = middle + mlp_out.last
                else:
                    assert layer.attn_norm is not None
                    assert layer.mlp_norm is not None
                    x = seen.inputs[index]
                    middle = layer.attn_norm(out.last + x)
                    end = layer.mlp_norm(mlp_out.last + middle)
                attention[index] += F.cosine_similarity(x, middle, dim=-1).double().sum().cpu()
                whole[index] += F.cosine_similarity(x, end, dim=-1).double().sum().cpu()
                x = end
        tokens += len(ids)
    return (attention / tokens).tolist(), (whole / tokens).tolist()


class _Inputs:
    """Keeps what each layer's attention is given."""

    def __init__(self, plain: Attend) -> None:
        self._plain = plain
        self.inputs: list[Tensor] = []

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        self.inputs.append(x.clone())
        return self._plain(layer, attention, x)


def most_alike(similarity: Sequence[float], count: int) -> list[int]:
    """The `count` layers with the highest similarity, ascending."""
    return sorted(sorted(range(len(similarity)), key=lambda layer: -similarity[layer])[:count])


def recorded_maps(embedder: Embedder, sentences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The maps of each sentence, float32 [layers, heads, s, s]."""
    found: list[Tensor] = []
    for start in range(0, len(sentences), RECORDED):
        attend: RecordingAttend = record(embedder, sentences[start : start + RECORDED])
        found += attend.sentences()
    return found


def fetch_layer(store: MapStore, found: Found, layer: int) -> Fetched:
    """One layer's maps of the nearest sentence of each that takes it; a damaged one's row is cleared."""
    places = np.full(len(found.layers), -1, np.int64)
    records: list[list[Record]] = []
    for row in np.flatnonzero(found.layers[:, layer]):
        try:
            one = store.read(int(found.numbers[row, 0]))[layer : layer + 1]
        except DamageError:
            found.layers[row, layer] = False
            continue
        places[row] = len(records)
        records.append([one])
    return Fetched(records, np.ones((len(records), 1), np.float32), places, first=layer)
