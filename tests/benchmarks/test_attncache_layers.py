"""AttnCache-f's thresholds: one for each layer, at which its maps alone keep what is promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.papers.attncache.baselines import build_layers
from benchmarks.papers.attncache.layer_thresholds import LayerPromises, furthest, nearest
from benchmarks.papers.attncache.passes import Passes

from afterglow.memo.memo_settings import OWN, Isotonic
from afterglow.model.encoder import BatchAttend
from tests.memo.kit import build, embedder, sentences


def test_the_furthest_distance_that_costs_no_more() -> None:
    error = Isotonic((0.0, 0.5, 1.0, 2.0), (0.0, 0.1, 0.1, 0.3))
    assert furthest(error, 0.05) == pytest.approx(0.25)
    assert furthest(error, 0.1) == pytest.approx(1.0)
    assert furthest(error, 0.2) == pytest.approx(1.5)
    assert furthest(error, 0.9) == 2.0  # of what lies beyond the last held-out sentence nothing is known
    assert furthest(Isotonic((0.0, 1.0), (0.2, 0.3)), 0.1) == OWN
    assert furthest(Isotonic((0.0,), (0.0,)), 0.1) == OWN


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_maps_of_any_layer_alone_keep_the_promised_cosine(kind: str, tmp_path: Path) -> None:
    plain, texts = embedder(kind), sentences(60, lengths=(5, 6))
    memo = build_layers(plain, build(plain, tmp_path, texts).store, texts, steps=20)
    held = [*sentences(40, seed=8, lengths=(5, 6)), *sentences(2, seed=9, lengths=(9,))]
    promises = LayerPromises(memo, plain, held)
    layers = plain.model.spec.layers
    assert len(promises.reckoned) == layers
    distances = nearest(memo, plain, held)
    assert np.isinf(distances[-2:]).all()  # no stored sentence is as long
    assert np.isfinite(distances[:-2]).all()
    passes = Passes(plain, held)
    exact = passes.run(BatchAttend).vectors
    worst = min(error.y[-1] for error in promises.reckoned)
    for cosine in (1 - worst / 2, 1 - worst / 10):
        thresholds = promises.thresholds(cosine)
        assert len(set(thresholds.round(4))) == layers, "layers' maps do not harm equally at the same distance"
        for layer in range(layers):
            alone = np.full(layers, np.inf)
            alone[layer] = thresholds[layer]
            found = passes.run(memo.at(alone).attend)
            taken = found.layers[:, layer]
            np.testing.assert_array_equal(taken, 1 - distances[:, layer] >= thresholds[layer])
            lost = 1 - (found.vectors * exact).sum(1).double().numpy()
            assert not taken.any() or lost[taken].mean() <= 1 - cosine + 1e-6
            # No lower: the next distance is not known to keep the promise.
            further = 1 - thresholds[layer] + 1e-3
            assert thresholds[layer] == 1 - OWN or promises.reckoned[layer](further) > 1 - cosine
    assert any(promises.thresholds(1 - worst / 2) < 1 - 2 * OWN), "some layer takes maps of other sentences"


def test_a_lower_promise_takes_more_maps(tmp_path: Path) -> None:
    plain, texts = embedder("encoder"), sentences(60, lengths=(5, 6))
    memo = build_layers(plain, build(plain, tmp_path, texts).store, texts, steps=20)
    held = sentences(40, seed=8, lengths=(5, 6))
    promises, passes = LayerPromises(memo, plain, held), Passes(plain, held)
    rates = [passes.run(memo.at(promises.thresholds(cosine)).attend).layers.mean() for cosine in (1.0, 0.999, 0.9, 0.0)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert not passes.run(memo.attend).layers.any()  # without thresholds no layer takes any


def test_layers_find_sentences_that_are_stored_however_often_they_were_given(tmp_path: Path) -> None:
    """Databases keep each sentence once, in an order of their own."""
    plain, once = embedder("encoder"), sentences(40, lengths=(5, 6))
    texts = [*once, *once[:15]]
    memo = build_layers(plain, build(plain, tmp_path, texts).store, texts, steps=20)
    assert nearest(memo, plain, once).max() < OWN
    passes = Passes(plain, once)
    found = passes.run(memo.at(np.full(plain.model.spec.layers, 1 - OWN)).attend)
    assert found.layers.all()
    assert (1 - (found.vectors * passes.run(BatchAttend).vectors).sum(1)).max() < 1e-4
