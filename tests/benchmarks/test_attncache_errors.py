"""Errors over pairs: draws beside the same computed pair by pair, and errors beside known ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.papers.attncache import sts_report
from benchmarks.papers.attncache.bootstrap import RESAMPLES, Resamples, error_of
from benchmarks.papers.attncache.measures import spearman


def test_each_draw_is_what_its_pairs_written_out_give() -> None:
    random = np.random.default_rng(5)
    gold = random.integers(0, 6, 40).astype(float)  # ties, as in the scores of people
    values = gold + random.normal(size=40)
    values[:6] = values[6]
    chosen = random.random(40) < 0.6
    resamples = Resamples(40, 3)
    assert resamples.counts.shape == (RESAMPLES, 40)
    assert (resamples.counts.sum(1) == 40).all()
    every, some = resamples.spearman(gold, values), resamples.spearman(gold, values, chosen)
    hits, of = random.random(80), random.random(80) < 0.5
    mean = resamples.mean(hits, of)
    for draw, counts in list(enumerate(resamples.counts.astype(int)))[:20]:
        pairs = np.repeat(np.arange(40), counts)
        assert every[draw] == pytest.approx(100 * spearman(gold[pairs], values[pairs]))
        pairs = pairs[chosen[pairs]]
        assert some[draw] == pytest.approx(100 * spearman(gold[pairs], values[pairs]))
        sentences = np.repeat(np.arange(80), counts.repeat(2))
        assert mean[draw] == pytest.approx(hits[sentences][of[sentences]].mean())


def test_errors_are_those_of_the_textbook() -> None:
    """A rank correlation near 0 of n pairs has an error of 1 / sqrt(n - 1); a mean, its deviation over sqrt(n)."""
    random = np.random.default_rng(1)
    gold, noise, hits = random.normal(size=400), random.normal(size=400), (random.random(800) < 0.3).astype(float)
    resamples = Resamples(400, 0)
    assert error_of(resamples.spearman(gold, noise)) == pytest.approx(100 / math.sqrt(399), rel=0.15)
    assert error_of(resamples.mean(hits)) == pytest.approx(hits.std() / math.sqrt(800), rel=0.15)


def test_draws_are_paired_and_repeat() -> None:
    """Two methods that differ little lose nearly the same in each draw; and a seed gives the same draws."""
    random = np.random.default_rng(2)
    gold = random.normal(size=250)
    full = gold + random.normal(size=250)
    near = full + 0.05 * random.normal(size=250)
    one, again, other = Resamples(250, 0), Resamples(250, 0), Resamples(250, 1)
    np.testing.assert_array_equal(one.counts, again.counts)
    assert (one.counts != other.counts).any()
    alone = error_of(one.spearman(gold, full))
    assert error_of(one.spearman(gold, near) - one.spearman(gold, full)) < alone / 5
    assert error_of(other.spearman(gold, near) - one.spearman(gold, full)) > alone


def test_what_has_no_number_has_no_error() -> None:
    resamples = Resamples(10, 0)
    equal, counted, none = np.ones(10), np.arange(10.0), np.zeros(10, bool)
    assert np.isnan(resamples.spearman(equal, counted)).all()
    assert math.isnan(error_of(resamples.spearman(counted, counted, none)))
    assert math.isnan(error_of(resamples.mean(np.arange(20.0), none.repeat(2))))
    assert error_of(resamples.mean(np.full(20, 0.25))) == 0


def test_the_error_of_a_mean_over_tasks() -> None:
    assert sts_report.pooled([3.0, 4.0]) == 2.5
    assert sts_report.pooled([3.0, None]) is None
    assert sts_report.pooled([]) is None


def test_the_error_of_a_share_of_losses_is_that_of_draws() -> None:
    """Losses of two methods that go up and down together, drawn often, beside the rule of first order."""
    random = np.random.default_rng(4)
    common, own, its = random.normal(size=(3, 2, 20000))
    losses = {"AttnCache-f": 9 + common + 0.5 * own, "SAN": 12 + common + 0.8 * its, "LazyFormer": 30 + own}
    rows = [
        {
            "method": method,
            "chosen": True,
            "loss": drawn[task].mean(),
            "loss_error": drawn[task].std(),
            "error_beside": {other: (drawn[task] - losses[other][task]).std() for other in ("SAN", "LazyFormer")},
        }
        for method, drawn in losses.items()
        for task in range(2)
    ]
    share, error = sts_report.loss_beside_shared(rows)
    assert share == pytest.approx(0.75, abs=0.01)
    drawn = losses["AttnCache-f"].mean(0) / losses["SAN"].mean(0)
    assert error == pytest.approx(drawn.std(), rel=0.05)
