"""Whether looking attention maps up pays, on this machine and for this model: what `auto` decides by.

A hit saves the queries' and the keys' part of attention. What it costs is a projection, a search, a read and a product
that fewer rows share. In small models that is more than it saves (AttnCache, 5.2, has none), so it is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from afterglow.memo.database import Fetched, MemoDatabase
from afterglow.memo.map_attention import AttentionMemo, Bools
from afterglow.memo.memo_settings import MemoSettings
from afterglow.memo.options import DEFAULT_THRESHOLD
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.encoder import runs

LEAST_GAIN = 1.15  # maps are not exact: less than this is not worth it
PASS_TOKENS, PASS_SENTENCES = 512, 32  # of a pass that is measured
ROUNDS, MOST_ROUNDS, SECONDS = 3, 25, 0.5  # of passes with and without maps, in turns
CURVE_SECONDS = 10.0  # after which `measure_curve` begins no other


@dataclass(frozen=True, slots=True)
class Gain:
    """`hit_rate` (of sentences) and `layer_rate` (of layers over all sentences) that held-out text showed at `threshold`, and
    `speedup`: time of whole passes without maps over that with them, at these rates."""

    threshold: float
    hit_rate: float
    layer_rate: float
    speedup: float

    @property
    def pays(self) -> bool:
        return self.speedup >= LEAST_GAIN


def expected_rates(settings: MemoSettings, threshold: float) -> tuple[float, float]:
    """Hit rate and layer rate on held-out text at `threshold`; between two that were measured, those of the higher."""
    above = [row for row in settings.curve if row["threshold"] >= threshold - 1e-9]
    if not above:
        return 0.0, 0.0
    row = min(above, key=lambda row: row["threshold"])
    return row["hit_rate"], row["layer_rate"]


def measure(
    embedder: Embedder, database: MemoDatabase, threshold: float, *, clock: Callable[[], float] = time.perf_counter
) -> Gain:
    """Time passes over random tokens, as long as the database's sentences; as many of the sentences take maps as held-out
    sentences did. About a second for small models; three passes each way, and one before, for large ones."""
    hit_rate, layer_rate = expected_rates(database.settings, threshold)
    lengths = _lengths(database.tokens[database.tokens > 0])
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(embedder.model.spec.vocab, (length,), generator=generator).tolist() for length in lengths]
    wanted = _wanted(database.settings, len(ids), hit_rate, layer_rate)
    plain = Embedder(embedder.model, embedder.pooling, max_tokens=embedder.max_tokens)
    memo = Embedder(
        embedder.model, embedder.pooling, memo=_Forced(database, threshold, wanted), max_tokens=embedder.max_tokens
    )
    ratios: list[float] = []
    spent, rounds = 0.0, 0
    while rounds <= ROUNDS or (spent < SECONDS and rounds <= MOST_ROUNDS):
        times = []
        for one in (plain, memo):
            began = clock()
            one.embed(ids)
            times.append(clock() - began)
        if rounds:  # the first one brings weights and maps into memory
            ratios.append(times[0] / times[1])
            spent += sum(times)
        rounds += 1
    return Gain(threshold, hit_rate, layer_rate, statistics.median(ratios))


def measure_curve(
    embedder: Embedder,
    database: MemoDatabase,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
    *,
    seconds: float = CURVE_SECONDS,
) -> None:
    """Put `speedup` into the rows of a fresh database's curve, where maps are taken at all, the default threshold's first, as
    long as there is time; and into `memo.json`."""
    curve = database.settings.curve
    known: dict[tuple[float, float], float] = {}
    began = time.perf_counter()
    order = sorted(curve, key=lambda row: (row["threshold"] != DEFAULT_THRESHOLD, -row["threshold"]))
    for done, row in enumerate(order):
        rates = (row["hit_rate"], row["layer_rate"])
        if rates not in known and (not done or (rates[1] > 0 and time.perf_counter() - began < seconds)):
            known[rates] = measure(embedder, database, row["threshold"]).speedup
        if rates in known:
            row["speedup"] = known[rates]
        report("measuring what maps save", done + 1, len(order))
    database.settings.save(database.folder)


def _lengths(known: np.ndarray) -> list[int]:
    """Lengths spread as those of the database are, ascending, that make one pass."""
    mean = max(1.0, float(known.mean()))
    count = int(np.clip(PASS_TOKENS // mean, 1, PASS_SENTENCES))
    return [int(n) for n in np.quantile(known, (np.arange(count) + 0.5) / count, method="nearest")]


def _wanted(settings: MemoSettings, count: int, hit_rate: float, layer_rate: float) -> Bools:
    """Which of `count` sentences take maps in which layers, [count, layers]: at these rates, in the layers in which maps
    do least harm."""
    layers = len(settings.errors)
    wanted = np.zeros((count, layers), bool)
    hits = np.random.default_rng(0).permutation(count)[: round(hit_rate * count)]
    each = round(layers * layer_rate / hit_rate) if hit_rate else 0
    wanted[np.ix_(hits, np.array(settings.order[:each], int))] = True
    return wanted


class _Forced(AttentionMemo):
    """Searches and fetches as ever, but takes maps where it is told to. Counts nothing."""

    def __init__(self, database: MemoDatabase, threshold: float, wanted: Bools) -> None:
        """`wanted` [sentences, layers] of every pass."""
        super().__init__(database, threshold)
        self._wanted = wanted

    def find(self, x: Tensor, lengths: Sequence[int]) -> tuple[list[Fetched], Bools]:
        fetched, layers, start, first = [], [], 0, 0
        for count, length in runs(lengths):
            inputs = x[start : (start := start + count * length)].view(count, length, -1)
            found = self.database.find(inputs, self.threshold)
            found.layers[:] = self._wanted[first : first + count] & (found.numbers.shape[1] > 0)
            fetched.append(self.database.fetch(found, count=False))
            layers.append(found.layers)
            first += count
        return fetched, np.concatenate(layers)
