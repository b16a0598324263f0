"""Passes of the compared methods over the same sentences."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from afterglow.bench.report import interleaved
from afterglow.memo.database import Fetched
from afterglow.memo.map_attention import AttentionMemo, Bools, MapsAttend
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.decoder import Attend
from afterglow.model.encoder import Model, runs
from benchmarks.papers.attncache.measures import Clock, now, timed_model

Make = Callable[[Model, Tensor, Sequence[int]], Attend]
"""A method: the `Attend` of a flat batch."""
BATCH_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Result:
    """Unit vectors [sentences, dimensions], and in which layers each sentence took maps [sentences, layers]."""

    vectors: Tensor
    layers: Bools


class Passes:
    """Embeds the same sentences with one method after another."""

    def __init__(self, embedder: Embedder, sequences: Sequence[Sequence[int]]) -> None:
        self.embedder, self.sequences = embedder, sequences
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        self.batches: list[list[int]] = [[]]
        for index in order:
            if sum(len(sequences[i]) for i in self.batches[-1]) + len(sequences[index]) > BATCH_TOKENS:
                self.batches.append([])
            self.batches[-1].append(index)

    @torch.inference_mode()
    def run(self, make: Make, clock: Clock | None = None, model: Model | None = None) -> Result:
        """One pass over all sentences; `clock` counts attention, output projection included. `model`: another one of the same
        size than the embedder's."""
        model = model or self.embedder.model
        model = model if clock is None else timed_model(model, clock)
        vectors = torch.empty(len(self.sequences), self.embedder.dimensions)
        layers = np.zeros((len(self.sequences), model.spec.layers), bool)
        for batch in self.batches:
            lengths = [len(self.sequences[i]) for i in batch]
            positions = torch.cat([torch.arange(length) for length in lengths])
            ids = torch.tensor([token for i in batch for token in self.sequences[i]])
            attend = make(model, positions, lengths)
            states = model.forward(ids, positions, attend if clock is None else clock.wrap(attend))
            vectors[batch] = self.embedder.pooling(states, runs(lengths))
            if isinstance(attend, MapsAttend):
                layers[batch] = attend.layers
        return Result(vectors, layers)

    def times(
        self, methods: dict[str, Make], repeats: int, models: Mapping[str, Model | None] | None = None
    ) -> dict[str, dict[str, float]]:
        """Time each method, by rounds in which all take their turn: `attention` and `whole`, the median of the rounds' ratios of
        the first method's time to its own, and `seconds`, the median of whole passes. `models`: the models of methods that have another."""
        clocks: dict[str, list[float]] = {name: [] for name in methods}

        def once(name: str, make: Make) -> float:
            clock = Clock()
            began = now()
            self.run(make, clock, (models or {}).get(name))
            whole = now() - began
            clocks[name].append(clock.seconds)
            return whole

        whole = interleaved({name: functools.partial(once, name, make) for name, make in methods.items()}, repeats)
        first = next(iter(methods))
        return {
            name: {
                "attention": _ratio(clocks[first], clocks[name]),
                "whole": _ratio(whole[first], whole[name]),
                "seconds": statistics.median(whole[name]),
            }
            for name in methods
        }


def _ratio(base: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


class Watched(AttentionMemo):
    """Notes how similar the found sentences are, sentence by sentence in the order of passes."""

    def __init__(self, memo: AttentionMemo) -> None:
        super().__init__(memo.database, memo.threshold)
        self._memo = memo
        self.similarity: list[float] = []

    def find(self, x: Tensor, lengths: Sequence[int]) -> tuple[list[Fetched], Bools]:
        start = 0
        for count, length in runs(lengths):
            inputs = x[start : (start := start + count * length)].view(count, length, -1)
            self.similarity += self.database.find(inputs, self.threshold).similarity.tolist()
        return self._memo.find(x, lengths)
