"""How far the attention maps of different sentences lie apart: figure 1 of AttnCache in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from afterglow.memo.distances import labels
from afterglow.memo.sequence_embedder import Embedder
from benchmarks.papers.attncache.baselines import recorded_maps


def distances(model: str, task: str, embedder: Embedder, known: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Figure 1 in numbers: how far maps of different sentences of equal length lie apart, by layer."""
    groups: dict[int, list[list[int]]] = {}
    for ids in unique(known):
        groups.setdefault(len(ids), []).append(ids)
    apart: list[np.ndarray] = []
    nearest: list[float] = []
    layers = embedder.model.spec.layers
    by_layer: list[list[np.ndarray]] = [[] for _ in range(layers)]
    for members in groups.values():
        if len(members) < 2:
            continue
        maps = recorded_maps(embedder, members[:60])
        first, second = np.triu_indices(len(maps), 1)
        pairs = labels(maps).numpy()
        apart.append(pairs[first, second])
        nearest += (pairs + 9 * np.eye(len(maps))).min(1).tolist()
        for layer in range(layers):
            by_layer[layer].append(labels([one[layer : layer + 1] for one in maps]).numpy()[first, second])
    at = (5, 25, 50, 75, 95)
    everything = np.concatenate(apart)
    about = {"model": model, "task": task, "pairs": len(everything)}
    rows = [
        {**about, "of": "all layers", **percentiles(everything, at)},
        {**about, "of": "nearest", **percentiles(np.array(nearest), at)},
    ]
    rows += [{**about, "of": f"layer {n}", **percentiles(np.concatenate(one), at)} for n, one in enumerate(by_layer)]
    return rows


def percentiles(values: np.ndarray, at: Sequence[int]) -> dict[str, float]:
    return {f"p{p}": round(float(v), 4) for p, v in zip(at, np.percentile(values, at), strict=True)}


def unique(sentences: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(ids) for ids in dict.fromkeys(map(tuple, sentences))]
