"""Whole passes of small models, with random weights, at hit rates: where looking maps up breaks even, and what it saves at most.

A pass with maps projects and searches; maps of one neighbour each are at hand.

    python -m benchmarks.papers.attncache.small_models [--threads N] [--quick] [--json FILE]
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread
from afterglow.choices import QuantizationName
from afterglow.memo.break_even import LEAST_GAIN
from afterglow.memo.database import Fetched
from afterglow.memo.map_attention import MapsAttend
from afterglow.memo.projector import Projector, ProjectorSpec
from afterglow.memo.vector_index import VectorIndex
from afterglow.model.encoder import BatchAttend
from afterglow.model.linear import int8_levels
from benchmarks.papers.attncache.measures import CLOCK, now
from benchmarks.papers.attncache.random_models import VOCAB, random_maps, random_model

MODELS = ("SmolLM2-135M", "BERT base")
LENGTHS = (16, 32, 64, 128)
RATES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
SENTENCES = 10
KNOWN = 1000  # sentences that a search looks at
KINDS = ("model", "weights", "tokens")


class Passes:
    """A batch of sentences of one length: passes without maps, and with those of some of the sentences, found by a search."""

    def __init__(self, name: str, quantization: QuantizationName, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._model = random_model(name, seed, quantization)
        spec = self._model.spec
        self._ids = torch.randint(VOCAB, (SENTENCES * length,), generator=generator)
        self._positions = torch.arange(length).repeat(SENTENCES)
        self._lengths = [length] * SENTENCES
        self._maps = random_maps(self._model, SENTENCES, length, generator)
        self._projector, self._index = Projector(ProjectorSpec("positions", spec.hidden, length)), VectorIndex()
        random = np.random.default_rng(seed)
        self._inputs = torch.randn(SENTENCES, length, spec.hidden, generator=generator)
        vectors = self._projector.project(self._inputs).numpy().repeat(KNOWN // SENTENCES, 0)
        noise = random.normal(size=vectors.shape).astype(np.float32)
        self._index.put(length, np.arange(len(vectors)), vectors + noise)

    def whole(self, rate: float | None) -> float:
        """Seconds of a pass at a hit rate, which projects and searches, or without maps (None)."""
        began = now()
        if rate is None:
            attend: BatchAttend | MapsAttend = BatchAttend(self._model, self._positions, self._lengths)
        else:
            self._index.search(self._lengths[0], self._projector.project(self._inputs).numpy())
            hits = np.zeros((SENTENCES, self._model.spec.layers), bool)
            hits[: round(rate * SENTENCES)] = True
            attend = MapsAttend(self._model, self._positions, self._lengths)
            attend.use([Fetched.own(self._maps)], hits)
        self._model.forward(self._ids, self._positions, attend)
        return now() - began


def main(args: Sequence[str] | None = None) -> int:
    parser = arguments("python -m benchmarks.papers.attncache.small_models", __doc__ or "")
    options = parser.parse_args(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    weights: tuple[QuantizationName, ...] = ("none", "int8") if int8_levels() else ("none",)
    rows, goals = measure(weights, quick=options.quick, seed=options.seed)
    finish(options, rows, goals, clock=CLOCK)
    return 0


def measure(
    weights: Sequence[QuantizationName], *, quick: bool, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and goals."""
    rows: list[dict[str, Any]] = []
    for name, kept, length in itertools.product(MODELS, weights, (32,) if quick else LENGTHS):
        passes = Passes(name, kept, length, seed)
        variants: dict[str, Callable[[], float]] = {str(rate): functools.partial(passes.whole, rate) for rate in RATES}
        variants["full"] = functools.partial(passes.whole, None)
        with torch.inference_mode():
            for variant in variants.values():
                variant()
            found = {key: np.array(times) for key, times in interleaved(variants, 7 if quick else 15).items()}
        for rate in RATES:
            gains = found["full"] / found[str(rate)]
            about = dict(zip(KINDS, (name, "float32" if kept == "none" else kept, length), strict=True))
            times = {"pass": round(float(np.median(gains)), 3), "spread": round(spread(list(gains)), 4)}
            rows.append({"what": "pass", **about, "hit_rate": rate, **times})
    even = break_even(rows)
    show(
        "small models: the hit rate from which on a pass with maps is faster, and how much faster it is where all have maps",
        (*KINDS, "hit rate", "most"),
        [
            [*(row[c] for c in KINDS), "never" if row["hit_rate"] is None else row["hit_rate"], row["most"]]
            for row in even
        ],
    )
    goals = []
    for name in MODELS:
        best = max((row for row in rows if row["model"] == name and row["hit_rate"] == 1), key=lambda row: row["pass"])
        title = f"a pass of {name}'s shape, {best['tokens']} tokens, {best['weights']}, all sentences with maps in all layers"
        goals.append(goal(title, best["pass"], LEAST_GAIN, least=True, spread=best["spread"]))
    return rows + even, goals


def break_even(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Find, for each model, kind of weights and length, the hit rate from which on a pass with maps takes less time than one
    without: between two that were measured, on the line between them. None: it never does."""
    found: list[dict[str, Any]] = []
    for kind, of_kind in itertools.groupby(rows, lambda row: [row[c] for c in KINDS]):
        rates, gains = zip(*((row["hit_rate"], row["pass"]) for row in of_kind), strict=True)
        first = next((i for i in range(len(gains)) if min(gains[i:]) >= 1), None)
        rate = None if first is None else rates[first]
        if first:
            rate = float(np.interp(1, gains[first - 1 : first + 1], rates[first - 1 : first + 1]))
        about = {"what": "break-even", **dict(zip(KINDS, kind, strict=True))}
        found.append({**about, "hit_rate": None if rate is None else round(rate, 2), "most": gains[-1]})
    return found


if __name__ == "__main__":
    sys.exit(main())
