"""What other sentences' maps do to sentences that the projector has not seen: calibration, and figure 5's curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afterglow.memo.database import Fetched, read_records
from afterglow.memo.distances import total_variation
from afterglow.memo.map_attention import MapsAttend
from afterglow.memo.maps import MapStore
from afterglow.memo.memo_settings import OWN, POWER, Isotonic, MemoSettings, isotonic
from afterglow.memo.packing import unpack
from afterglow.memo.sequence_embedder import Embedder
from afterglow.memo.vector_index import VectorIndex, weights_of
from afterglow.model.encoder import BatchAttend

THRESHOLDS = (0.999, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.92, 0.91, 0.9, 0.89, 0.88, 0.87, 0.86, 0.85)
WORST = 0.1  # of the held-out sentences, by how far they exceed what their distance says
Report = Callable[[str, int, int], None]  # what, done, total
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A sentence that the index does not have: its ids, its feature vector, and its own maps, packed [layers, heads, numbers]."""

    ids: Sequence[int]
    query: Vector
    maps: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Held-out sentences of one length that have neighbours: their ids, exact vectors, and what they would be given."""

    ids: list[list[int]]
    distances: NDArray[np.float32]
    variations: Tensor
    maps: Fetched


class HeldOutTrial:
    """Embeds held-out sentences with maps of others."""

    def __init__(
        self, embedder: Embedder, store: MapStore, index: VectorIndex, held: Sequence[HeldOut], neighbours: int
    ) -> None:
        """`held`: sentences that `index` does not have; their neighbours' maps are in `store`."""
        self._embedder, self.count = embedder, len(held)
        self.buckets: list[Bucket] = []
        lengths = sorted({len(one.ids) for one in held})
        for length in lengths:
            members = [one for one in held if len(one.ids) == length]
            distances, numbers = index.search(length, np.stack([one.query for one in members]), neighbours)
            if not distances.shape[1]:
                continue
            weights = weights_of(distances, POWER)
            every = np.arange(len(members))
            found = Fetched([read_records(store, *row) for row in zip(numbers, weights, strict=True)], weights, every)
            layers, causal = range(store.identity.layers), store.identity.causal
            maps = torch.stack([found.layer(layer, every) for layer in layers], 1)
            own = torch.from_numpy(np.stack([one.maps for one in members]))
            apart = total_variation(unpack(own, length, causal=causal), unpack(maps, length, causal=causal))
            self.buckets.append(Bucket([list(one.ids) for one in members], distances[:, 0], apart, found))
        self.distances = _joined([bucket.distances for bucket in self.buckets])
        self.variations = _joined([bucket.variations.numpy() for bucket in self.buckets])
        self._exact = self._embed(None)

    def errors(self, layers: NDArray[np.bool_]) -> NDArray[np.float64]:
        """`layers` [sentences, layers]: which take maps -> 1 - cosine to the exact embedding, [sentences]."""
        return 1 - (self._embed(layers) * self._exact).sum(1).double().numpy()

    def _embed(self, layers: NDArray[np.bool_] | None) -> Tensor:
        model = self._embedder.model
        out, start = [torch.empty(0, self._embedder.dimensions)], 0
        for bucket in self.buckets:
            count, length = len(bucket.ids), len(bucket.ids[0])
            positions = torch.arange(length, device=model.device).repeat(count)
            lengths = [length] * count
            ids = torch.tensor(bucket.ids, device=model.device).flatten()
            with torch.inference_mode():
                if layers is None:
                    states = model.forward(ids, positions, BatchAttend(model, positions, lengths))
                else:
                    attend = MapsAttend(model, positions, lengths)
                    attend.use([bucket.maps], layers[start : start + count])
                    states = model.forward(ids, positions, attend)
                out.append(self._embedder.pooling(states, [(count, length)]).cpu())
            start += count
        return torch.cat(out)


def calibrate(
    trial: HeldOutTrial, layers: int, report: Report
) -> tuple[Isotonic, tuple[int, ...], tuple[Isotonic, ...]]:
    """Fit distance to the nearest sentence -> total variation, and -> error of the embedding for each number of layers, in the order
    of their harm: see `MemoSettings`. Without any held-out sentence that has a neighbour nothing is known, and only sentences' own maps
    will be accepted."""
    nothing = Isotonic((0.0, OWN), (0.0, 1.0))
    if not len(trial.distances):
        return nothing, tuple(range(layers)), (nothing,) * layers
    harm = []
    for layer in range(layers):
        harm.append(float(trial.errors(_all(trial, layers, [layer])).mean()))
        report("calibrating", layer + 1, 2 * layers)
    order = tuple(int(layer) for layer in np.argsort(harm, kind="stable"))
    errors = []
    for count in range(1, layers + 1):
        errors.append(reckoned(trial.distances, trial.errors(_all(trial, layers, order[:count]))))
        report("calibrating", layers + count, 2 * layers)
    return _from_zero(trial.distances, trial.variations), order, tuple(errors)


def reckoned(distances: NDArray[Any], errors: NDArray[np.float64]) -> Isotonic:
    """Fit distance -> the error to be reckoned with, on texts of any source: the mean at that distance, times what it is
    exceeded by among the `WORST` of the held-out sentences.

    Texts of another source attend differently at the same distance: short ones without a noun are changed by other maps several
    times as much. The mean over the worst tenth is the most that the mean can be on a source that has each kind of sentence at most
    ten times as often.
    """
    fitted = _from_zero(distances, errors)
    other = distances > OWN
    beyond = np.sort(np.maximum(errors, 0)[other] / np.maximum(fitted(distances[other]), 1e-6))
    if not len(beyond):
        return fitted
    times = max(1.0, float(beyond[-max(1, round(WORST * len(beyond))) :].mean()))
    return Isotonic(fitted.x, tuple(times * y for y in fitted.y))


def threshold_curve(trial: HeldOutTrial, settings: MemoSettings, report: Report) -> list[dict[str, float]]:
    """Compute rows of threshold, hit rate (of sentences), layer rate (of layers over all sentences), error (mean 1 - cosine over all
    held-out sentences) and variation (mean total variation of the accepted maps)."""
    rows: list[dict[str, float]] = []
    last: NDArray[np.bool_] | None = None
    for done, threshold in enumerate(THRESHOLDS):
        layers, _ = settings.accepted(trial.distances, threshold)
        if last is not None and np.array_equal(layers, last):
            rows.append({**rows[-1], "threshold": threshold})
            continue
        last, hits = layers, layers.any(1)
        error = trial.errors(layers)[hits].sum() / trial.count if hits.any() else 0.0
        rows.append(
            {
                "threshold": threshold,
                "hit_rate": float(hits.sum() / trial.count),
                "layer_rate": float(layers.mean(1).sum() / trial.count),
                "error": float(max(error, 0.0)),
                "variation": float(trial.variations[hits].mean()) if hits.any() else 0.0,
            }
        )
        report("measuring", done + 1, len(THRESHOLDS))
    return rows


def _all(trial: HeldOutTrial, layers: int, taken: Sequence[int]) -> NDArray[np.bool_]:
    """Let all held-out sentences take maps in the layers `taken`."""
    chosen = np.zeros((len(trial.distances), layers), bool)
    chosen[:, list(taken)] = True
    return chosen


def _from_zero(distances: NDArray[Any], values: NDArray[Any]) -> Isotonic:
    """Held-out sentences may all have been far from any other; at distance 0 the maps are the sentence's own."""
    x, y = np.append(0.0, distances.astype(float)), np.append(0.0, np.maximum(values.astype(float), 0))
    return isotonic(x, y)


def _joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
