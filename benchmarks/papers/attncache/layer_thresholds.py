"""AttnCache-f's thresholds, one for each layer: maps of any layer alone are to cost the embedding equally much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from afterglow.memo.build import record
from afterglow.memo.evaluate import reckoned
from afterglow.memo.memo_settings import OWN, Isotonic
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.encoder import BatchAttend
from benchmarks.papers.attncache.baselines import RECORDED, LayerMemo
from benchmarks.papers.attncache.passes import Passes

Floats = NDArray[np.float64]
ALL, NONE = -1e9, np.inf  # thresholds that any neighbour reaches, and that none does


class LayerPromises:
    """What maps of one layer do to the embeddings of held-out sentences, by how far the sentence is that this layer's search finds."""

    def __init__(self, memo: LayerMemo, embedder: Embedder, sentences: Sequence[Sequence[int]]) -> None:
        """`sentences`: such as the memo was not made of. All other layers compute their own maps."""
        distances = nearest(memo, embedder, sentences)
        passes = Passes(embedder, sentences)
        exact = passes.run(BatchAttend).vectors
        self.reckoned: list[Isotonic] = []
        """For each layer, distance -> 1 - cosine to the exact embedding, by the rule of the program's own databases."""
        for layer in range(distances.shape[1]):
            alone = np.full(distances.shape[1], NONE)
            alone[layer] = ALL
            found = passes.run(memo.at(alone).attend)
            taken = found.layers[:, layer]
            lost = 1 - (found.vectors * exact).sum(1).double().numpy()
            self.reckoned.append(reckoned(distances[taken, layer], lost[taken]))

    def thresholds(self, cosine: float) -> Floats:
        """Choose the least similarity of each layer, [layers], at which its maps alone keep the embedding at `cosine` to the exact one."""
        return np.array([1 - furthest(error, 1 - cosine) for error in self.reckoned])


def furthest(error: Isotonic, most: float) -> float:
    """Find the largest distance with an error of at most `most`. A sentence's own maps are always near enough, and nothing is known
    beyond the last held-out sentence."""
    x, y = np.array(error.x), np.array(error.y)
    fits = np.flatnonzero(y <= most)
    if not len(fits):
        return OWN
    last = int(fits[-1])
    if last + 1 == len(x):
        return max(OWN, float(x[-1]))
    share = (most - y[last]) / (y[last + 1] - y[last])
    return max(OWN, float(x[last] + share * (x[last + 1] - x[last])))


def nearest(memo: LayerMemo, embedder: Embedder, sentences: Sequence[Sequence[int]]) -> Floats:
    """Measure how far the nearest sentence is from each in each layer of an exact pass, [sentences, layers]; inf where no sentence has as
    many tokens."""
    rows = []
    for start in range(0, len(sentences), RECORDED):
        batch = sentences[start : start + RECORDED]
        inputs = [torch.split(x, [len(ids) for ids in batch]) for x in record(embedder, batch).inputs]
        rows += [
            [float(memo.find(layer, inputs[layer][at][None]).distances[0]) for layer in range(len(inputs))]
            for at in range(len(batch))
        ]
    return np.array(rows)
