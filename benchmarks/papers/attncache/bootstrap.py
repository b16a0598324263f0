"""How sure scores of pairs are: the same pairs drawn anew, for all methods alike (Efron's bootstrap)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
RESAMPLES = 1000


class Resamples:
    """Draws of pairs with replacement. They are the same for all methods, so that differences between two are paired."""

    def __init__(self, pairs: int, seed: int) -> None:
        draws = np.random.default_rng(seed).multinomial(pairs, np.full(pairs, 1 / pairs), RESAMPLES)
        self.counts: Numbers = draws.astype(np.float64)
        """How often each pair is in each draw, [RESAMPLES, pairs]."""

    def spearman(self, first: Numbers, second: Numbers, chosen: NDArray[np.bool_] | None = None) -> Numbers:
        """Compute 100 x the rank correlation of two columns [pairs] in each draw, [RESAMPLES]; not a number where all of a column
        are equal. `chosen` [pairs]: only pairs of these."""
        counts = self.counts if chosen is None else self.counts[:, chosen]
        columns = [np.asarray(one if chosen is None else one[chosen], np.float64) for one in (first, second)]
        if not counts.shape[1]:
            return np.full(RESAMPLES, np.nan)
        a, b = (_centred(_ranks(column, counts), counts) for column in columns)
        with np.errstate(invalid="ignore"):
            apart = np.sqrt((counts * a * a).sum(1) * (counts * b * b).sum(1))
            return np.asarray(100 * (counts * a * b).sum(1) / np.where(apart > 0, apart, np.nan), np.float64)

    def mean(self, values: Numbers, chosen: NDArray[np.bool_] | None = None) -> Numbers:
        """Compute the mean of `values` [2 x pairs], two of each pair, in each draw, [RESAMPLES]. `chosen` [2 x pairs]: only of
        these; not a number where a draw has none."""
        counts = self.counts.repeat(2, 1)
        if chosen is not None:
            counts, values = counts[:, chosen], values[chosen]
        total = counts.sum(1)
        return np.asarray((counts * values).sum(1) / np.where(total > 0, total, np.nan), np.float64)


def error_of(draws: Numbers) -> float:
    """Compute the standard error of a number from its value in each draw; not a number without two draws that have one."""
    known = draws[np.isfinite(draws)]
    return float(known.std(ddof=1)) if len(known) > 1 else math.nan


def _ranks(values: Numbers, counts: Numbers) -> Numbers:
    """Rank `values` [pairs] in each draw, [draws, pairs]; ties share their mean rank."""
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(place.max() + 1))
    each = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks: Numbers = (2 * each.cumsum(1) - each + 1) / 2
    return ranks[:, place]


def _centred(ranks: Numbers, counts: Numbers) -> Numbers:
    total = counts.sum(1, keepdims=True)
    return np.asarray(ranks - (counts * ranks).sum(1, keepdims=True) / np.where(total > 0, total, 1), np.float64)
