"""How a method is judged: a setting is chosen on validation pairs and reported on test pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from afterglow.memo.texts import TextEmbedder
from afterglow.model.encoder import BatchAttend, Model
from benchmarks.papers.attncache.bootstrap import Numbers, Resamples
from benchmarks.papers.attncache.measures import cosines, spearman
from benchmarks.papers.attncache.passes import Make, Passes

LOSS = 2.0  # points of Spearman x 100 that a method may cost: the paper's
FAR = 6.0  # with so many points lost, lower thresholds are not looked at
LEAST_RATE = 0.30


@dataclass(frozen=True, slots=True)
class Part:
    """Sentences of pairs, tokenised, and the scores of the pairs."""

    asked: list[list[int]]
    gold: list[float]


@dataclass(frozen=True, slots=True)
class Task:
    """One data set: what databases are made of, pairs to choose settings by, and pairs to report on."""

    name: str
    model: str
    embedder: TextEmbedder
    known: list[list[int]]
    validation: Part
    test: Part
    narrow: dict[str, Model]  # the same with weights of fewer bits


@dataclass(frozen=True, slots=True)
class Judged:
    """What a method did on one part. What there is nothing to count for is not a number."""

    spearman: float
    unseen_spearman: float  # of the pairs of two sentences that are not in the database
    rate: float
    error: float  # mean 1 - cosine to the full model's vectors
    known_rate: float  # the rate among sentences that are literally in the database
    unseen_rate: float  # and among the others
    cosines: Numbers  # of each pair, [pairs]
    hits: Numbers  # the share of layers that took maps, [sentences]


@dataclass(frozen=True, slots=True)
class Found:
    """What a method did at one setting."""

    method: str
    setting: float | None
    validation: Judged
    test: Judged
    make: Make
    model: Model | None = None  # where it is not the task's
    layers: Numbers | None = None  # thresholds of the layers, where each has its own


class Judge:
    """The full model's vectors of one part, and what others lose against them."""

    def __init__(self, task: Task, part: Part) -> None:
        self.part = part
        self.passes = Passes(task.embedder.embedder, part.asked)
        self.exact = self.passes.run(BatchAttend)
        known = {tuple(ids) for ids in task.known}
        self.known: NDArray[np.bool_] = np.array([tuple(ids) in known for ids in part.asked])
        self.unseen_pairs: NDArray[np.bool_] = np.logical_not(np.logical_or(self.known[::2], self.known[1::2]))

    def judged(self, vectors: Tensor, hits: Numbers, rate: float | None = None) -> Judged:
        """`hits` [sentences]: the share of layers that took maps. `rate`: of methods that have no hits."""
        pairs, gold, unseen = cosines(vectors), np.array(self.part.gold), self.unseen_pairs
        return Judged(
            100 * spearman(gold.tolist(), pairs.tolist()),
            100 * spearman(gold[unseen].tolist(), pairs[unseen].tolist()),
            float(hits.mean()) if rate is None else rate,
            float(1 - (vectors * self.exact.vectors).sum(1).mean()),
            float(hits[self.known].mean()) if rate is None and self.known.any() else float("nan"),
            float(hits[~self.known].mean()) if rate is None and not self.known.all() else float("nan"),
            pairs,
            hits if rate is None else np.full(len(hits), rate),
        )

    def draws(self, judged: Judged, resamples: Resamples) -> dict[str, Numbers]:
        """Compute a method's scores and rates on each of the resamples of the pairs, [RESAMPLES] each."""
        gold = np.array(self.part.gold)
        return {
            "spearman": resamples.spearman(gold, judged.cosines),
            "unseen_spearman": resamples.spearman(gold, judged.cosines, self.unseen_pairs),
            "hit_rate": resamples.mean(judged.hits),
            "unseen_hit_rate": resamples.mean(judged.hits, ~self.known),
        }

    def run(self, make: Make, rate: float | None = None, model: Model | None = None) -> Judged:
        result = self.passes.run(make, model=model)
        return self.judged(result.vectors, result.layers.mean(1), rate)


@dataclass(frozen=True, slots=True)
class Judges:
    """One for each part that is asked."""

    validation: Judge
    test: Judge

    def __iter__(self) -> Iterator[Judge]:
        return iter((self.validation, self.test))


def choose(found: Sequence[Found]) -> dict[str, Found]:
    """Each method's setting, by the validation part alone: the highest hit rate that costs at most `LOSS` points there
    (AttnCache-f: the nearest to the published hit rate, as it may cost more at any)."""
    chosen: dict[str, Found] = {}
    least = found[0].validation.spearman - LOSS
    for method in dict.fromkeys(f.method for f in found):
        settings = [f for f in found if f.method == method]
        cheap = [f for f in settings if f.validation.spearman >= least]
        if method == "AttnCache-f":
            chosen[method] = min(settings, key=lambda f: abs(f.validation.rate - LEAST_RATE))
        elif cheap:
            chosen[method] = max(cheap, key=lambda f: f.validation.rate)
        else:
            chosen[method] = max(settings, key=lambda f: f.validation.spearman)
    return chosen
