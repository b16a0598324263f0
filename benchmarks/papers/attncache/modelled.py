"""AttnCache's table 1 beside the operator model."""

from __future__ import annotations

from collections.abc import Iterator

from afterglow.sim.machine.catalogue import model
from afterglow.sim.operators.memo import (
    HIT_RATE,
    SENTENCE,
    XEONS,
    LayerTimes,
    layer_times,
    projection_seconds,
    speedup,
)
from benchmarks.papers.attncache.measures import gamma
from benchmarks.papers.modelled_rows import FITTED, Row, row

TABLE_1 = {  # speedups: SAN, LazyFormer, AttnCache-f, AttnCache; their mean scores, %; and the full model's
    "LLaMA-2-7B": ((1.45, 1.39, 1.14, 1.19), (30.34, 34.48, 50.39, 67.75), 68.60),
    "Llama-3-8B": ((1.49, 1.42, 1.16, 1.21), (46.81, 46.49, 50.46, 69.63), 71.88),
    "Mistral-7B": ((1.44, 1.38, 1.15, 1.20), (46.39, 45.67, 50.63, 70.31), 72.13),
}
GAMMAS = {  # of the same
    "LLaMA-2-7B": (0.85, 0.87, 1.30, 0.04),
    "Llama-3-8B": (0.51, 0.60, 1.34, 0.11),
    "Mistral-7B": (0.58, 0.70, 1.43, 0.09),
}
METHODS = ("SAN", "LazyFormer", "AttnCache-f", "AttnCache")


# -------------------------------------------------------------------------------------------------- AttnCache


def attncache() -> Iterator[Row]:
    for name, (speedups, scores, full) in TABLE_1.items():
        shape = model(name)
        times, each = layer_times(shape, XEONS, SENTENCE), projection_seconds(shape, XEONS, SENTENCE)
        figure, layers = "AttnCache Table 1", shape.layers
        fit = FITTED if name == "LLaMA-2-7B" else ""
        yield row(figure, f"{name} LazyFormer, x", speedups[1], speedup(times, layers, 0.5), fit)
        yield row(figure, f"{name} AttnCache, x", speedups[3], speedup(times, layers, HIT_RATE, each), "hit rate 30 %")
        share = hit_rate_for(times, layers, speedups[0])
        yield row(figure, f"{name} SAN, share of layers", "not printed", share, f"that gives {speedups[0]}")
        least, most = (hit_rate_for(times, layers, speedups[2], x * each * layers) for x in (0.1, 1.0))
        yield row(
            figure,
            f"{name} AttnCache-f, hit rate",
            "not printed",
            f"{least:.2f}-{most:.2f}",
            f"that gives {speedups[2]}, a layer's search taking 0.06-0.6 ms",
        )
        for method, paper, score, speed in zip(METHODS, GAMMAS[name], scores, speedups, strict=True):
            found = gamma(full / 100, score / 100, speed)
            yield row("AttnCache Table 1", f"{name} {method}, gamma", paper, round(found, 2), "from the printed values")


def hit_rate_for(times: LayerTimes, layers: int, wanted: float, projection: float = 0.0) -> float:
    """The hit rate that gives a speedup; more than 1, if none does."""
    return (1 + projection / layers / times.full - 1 / wanted) / times.saved
