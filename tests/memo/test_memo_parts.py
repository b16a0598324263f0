"""Projectors, calibration, search: the pure parts."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afterglow.errors import ConfigError, DamageError
from afterglow.memo.distances import labels
from afterglow.memo.evaluate import WORST, calibrate, reckoned
from afterglow.memo.memo_settings import MemoSettings, isotonic
from afterglow.memo.options import MemoOptions
from afterglow.memo.projector import Projector, ProjectorSpec
from afterglow.memo.training import train
from afterglow.memo.vector_index import VectorIndex, weights_of

KINDS = ["positions", "binned", "public"]


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_length_fit(kind: str, tmp_path: Path) -> None:
    spec = ProjectorSpec(kind, hidden=24, max_tokens=40)  # type: ignore[arg-type]
    projector = Projector(spec)
    for tokens in (1, 2, 15, 16, 17, 40):
        x = torch.randn(3, tokens, 24, generator=torch.Generator().manual_seed(tokens))
        assert spec.reduce(x).shape == (3, spec.width(tokens))
        vectors = projector.project(x)
        assert vectors.shape == (3, 16 * tokens if kind == "positions" else 128)
        torch.testing.assert_close(vectors[1:2], projector.project(x[1:2]))
    projector.save(tmp_path / "p.safetensors")
    torch.testing.assert_close(Projector.load(tmp_path / "p.safetensors").project(x), vectors)


def test_public_refuses_what_it_has_no_place_for() -> None:
    with pytest.raises(ConfigError, match="40 tokens at most, got 41"):
        ProjectorSpec("public", 24, 40).reduce(torch.zeros(1, 41, 24))
    assert ProjectorSpec("public", 384, 2048).width(7) == 128 * 192  # halved to 1,024 rows, then to 128


def test_order_of_tokens_matters() -> None:
    x = torch.randn(1, 12, 24)
    for kind in ("positions", "binned", "public"):
        projector = Projector(ProjectorSpec(kind, 24, 12))  # type: ignore[arg-type]
        assert not torch.allclose(projector.project(x), projector.project(x.flip(1)), atol=1e-6)


def test_a_damaged_projector_is_reported(tmp_path: Path) -> None:
    (tmp_path / "p.safetensors").write_bytes(b"no")
    with pytest.raises(DamageError, match="build the database anew"):
        Projector.load(tmp_path / "p.safetensors")


@pytest.mark.parametrize("kind", ["positions", "binned"])
def test_training_brings_distances_to_labels(kind: str) -> None:
    """Maps that depend on the input by a softmax: after training, distances say which are alike."""
    generator = torch.Generator().manual_seed(0)
    tokens = np.full(80, 6, np.int64)
    x = torch.randn(80, 6, 24, generator=generator)
    maps = (x @ x.transpose(1, 2) * 0.1).softmax(-1)[:, None, None]
    spec = ProjectorSpec(kind, 24, 6)  # type: ignore[arg-type]
    reduced = spec.reduce(x)

    def error(projector: Projector) -> float:
        vectors = projector.project(x)
        wanted = labels(list(maps))
        return float((torch.cdist(vectors, vectors) - wanted).abs().mean())

    def learn(steps: int) -> Projector:
        return train(spec, tokens, 1, lambda n: reduced[n], lambda n, heads: maps[n][:, heads], steps=steps)

    assert error(learn(200)) < error(learn(1)) / 2


def test_training_as_published_runs() -> None:
    x = [torch.randn(s, 24, generator=torch.Generator().manual_seed(s)) for s in (4, 5, 6, 7) * 9]
    spec = ProjectorSpec("public", 24, 8)
    maps = [(one @ one.T).softmax(-1)[None, None] for one in x]
    inputs = [spec.reduce(one[None])[0] for one in x]
    tokens = np.array([len(one) for one in x])
    projector = train(spec, tokens, 1, lambda n: inputs[n], lambda n, heads: maps[n], mode="public")
    assert projector.project(x[0][None]).isfinite().all()
    assert not projector.training


@hypothesis.settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), min_size=1, max_size=30))
def test_isotonic_never_falls_and_keeps_the_mean(points: list[tuple[float, float]]) -> None:
    x, y = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    fitted = isotonic(x, y)
    at = fitted(np.linspace(-1, 11, 50))
    assert (np.diff(at) >= -1e-12).all()
    assert fitted(x).mean() == pytest.approx(y.mean(), abs=1e-9)


def test_isotonic_by_hand() -> None:
    fitted = isotonic([1, 2, 3, 4], [1, 3, 2, 4])
    assert fitted([1, 2, 3, 4]).tolist() == [1, 2.5, 2.5, 4]
    assert fitted([0, 9]).tolist() == [1, 4]
    assert isotonic([1, 1], [0, 1])([1]).tolist() == [0.5]


def test_search_is_exact_and_never_crosses_lengths() -> None:
    random = np.random.default_rng(0)
    index = VectorIndex()
    vectors = random.normal(size=(300, 16)).astype(np.float32)
    index.put(7, np.arange(1000, 1300), vectors)
    index.put(8, np.arange(5), vectors[:5])
    queries = np.concatenate((random.normal(size=(20, 16)), vectors[:2])).astype(np.float32)
    distances, numbers = index.search(7, queries, 3)
    apart = np.linalg.norm(vectors[None] - queries[:, None], axis=2)
    np.testing.assert_array_equal(numbers, 1000 + np.argsort(apart, 1)[:, :3])
    np.testing.assert_allclose(distances, np.sort(apart, 1)[:, :3], rtol=1e-5)
    assert distances[20, 0] == 0  # not the difference of two squares
    assert index.search(8, queries, 9)[0].shape == (22, 5)
    assert index.search(9, queries, 3)[0].shape == (22, 0)


def test_graphs_find_nearly_all_and_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    vectors = random.normal(size=(2000, 32)).astype(np.float32)
    queries = vectors[:100] + random.normal(size=(100, 32)).astype(np.float32) * 0.1
    index = VectorIndex(tmp_path, approximate_from=1000)
    index.put(7, np.arange(2000), vectors)
    exact = VectorIndex()
    exact.put(7, np.arange(2000), vectors)
    found = index.search(7, queries)[1]
    assert (found == exact.search(7, queries)[1]).mean() > 0.98
    kept = (tmp_path / "hnsw-7.faiss").stat().st_mtime_ns
    again = VectorIndex(tmp_path, approximate_from=1000)
    again.put(7, np.arange(2000), vectors)
    np.testing.assert_array_equal(again.search(7, queries)[1], found)
    assert (tmp_path / "hnsw-7.faiss").stat().st_mtime_ns == kept
    other = VectorIndex(tmp_path, approximate_from=1000)  # another database's graph is not taken
    other.put(7, np.arange(2000), vectors[::-1].copy())
    assert (other.search(7, vectors[:50])[1][:, 0] == 1999 - np.arange(50)).mean() > 0.98


def test_of_neighbours_that_a_graph_does_not_find_none_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mock.Mock(**{"search.return_value": (None, np.array([[3, -1, -1]]))})  # so does Faiss number them
    monkeypatch.setitem(sys.modules, "faiss", mock.Mock(IndexHNSWFlat=lambda *_: graph))
    index = VectorIndex(approximate_from=10)
    vectors = np.arange(10, dtype=np.float32)[:, None]
    index.put(7, np.arange(10), vectors)
    distances, numbers = index.search(7, vectors[9:], 3)
    assert distances.tolist() == [[6.0, math.inf, math.inf]]
    assert numbers[0, 0] == 3


def test_without_faiss_the_search_is_exact_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    index = VectorIndex(approximate_from=10)
    vectors = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    index.put(5, np.arange(12), vectors)
    assert index.search(5, vectors)[1][:, 0].tolist() == list(range(12))
    assert "12 sentences have 5 tokens" in index.notes[0]
    assert "pip install faiss-cpu" in index.notes[0]


def test_points_at_one_place_count_by_their_mean() -> None:
    """Whatever their order: a small value at the next place does not pull all of them together."""
    fitted = isotonic([1, 1, 2, 2], [0, 4, 1, 5])
    assert (fitted.x, fitted.y) == ((1.0, 2.0), (2.0, 3.0))


def test_weights() -> None:
    found = weights_of(np.array([[0.0, 0.3, 0.3], [0.2, 0.2, 0.4]], np.float32), 2)
    np.testing.assert_allclose(found, [[1, 0, 0], [4 / 9, 4 / 9, 1 / 9]], atol=1e-6)


def settings(accept: str, similarity: str = "1-d") -> MemoSettings:
    """Layer 0 and then 2 do little harm, all three together as much as the distance."""
    errors = tuple(isotonic([0, 1], [0, most]) for most in (0.1, 0.2, 1))
    options = MemoOptions(accept=accept, similarity=similarity)  # type: ignore[arg-type]
    return MemoSettings(
        records=1,
        trained_on=1,
        vectors_crc=0,
        options=options,
        variation=errors[2],
        order=(0, 2, 1),
        errors=errors,
    )


def test_a_sentence_is_taken_whole_at_the_threshold() -> None:
    layers, similarity = settings("sentence").accepted(np.array([0.1, 0.11, np.inf]), 0.9)
    assert layers.tolist() == [[True] * 3, [False] * 3, [False] * 3]
    assert similarity.tolist() == [0.9, 0.89, -np.inf]
    layers, _ = settings("sentence", "1-d2").accepted(np.array([0.31, 0.32]), 0.9)
    assert layers[:, 0].tolist() == [True, False]


def test_layers_are_taken_as_long_as_their_error_together_is_less() -> None:
    layers, similarity = settings("layers").accepted(np.array([0.0, 0.4, 0.5, 0.9, np.inf]), 0.92)
    assert layers.tolist() == [
        [True, True, True],
        [True, False, True],  # 0.08 together, and 0.4 with the third
        [True, False, False],
        [False, False, False],  # 0.09 is too much for any
        [False, False, False],
    ]
    assert similarity[:3].tolist() == pytest.approx([1, 0.92, 0.95])
    assert similarity[4] == -np.inf


def test_more_layers_are_never_reckoned_with_less() -> None:
    """By chance a third layer undoes on held-out sentences what the second does."""
    falling = dataclasses.replace(settings("layers"), errors=tuple(isotonic([0, 1], [0, y]) for y in (0.1, 0.3, 0.2)))
    layers, similarity = falling.accepted(np.array([0.4]), 0.9)
    assert layers.tolist() == [[True, False, False]]
    assert similarity.tolist() == pytest.approx([0.96])


class Trial:
    """Sentences at these distances; a tenth of them, of any distance, is `times` as sensitive as the others."""

    def __init__(self, times: float, together: float = 1.0) -> None:
        self.distances = np.linspace(0.01, 1, 100)
        self.variations = self.distances
        self._sensitive = np.where(np.arange(100) % 10 == 5, times, 1.0)
        self._together = together

    def errors(self, layers: np.ndarray) -> np.ndarray:
        own = np.outer(self.distances * self._sensitive, [0.1, 1, 0.05]) * layers
        return np.where(layers.sum(1) > 1, self._together, 1) * own.sum(1)


def calibrated(trial: Trial) -> MemoSettings:
    _, order, errors = calibrate(trial, 3, lambda what, done, total: None)  # type: ignore[arg-type]
    return dataclasses.replace(settings("layers"), order=order, errors=errors)


@pytest.mark.parametrize("times", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("together", [1.0, 3.0])
def test_a_threshold_holds_for_the_most_sensitive_sentences_alone(times: float, together: float) -> None:
    """A source of nothing but these keeps what is promised; a mean over all held-out sentences would promise it too little."""
    trial = Trial(times, together)
    found = calibrated(trial)
    assert found.order == (2, 0, 1)
    sensitive = np.arange(100) % 10 == 5
    for threshold in (0.99, 0.95, 0.9, 0.8):
        layers, similarity = found.accepted(trial.distances, threshold)
        hits = layers.any(1) & sensitive
        if hits.any():
            assert trial.errors(layers)[hits].mean() <= 1.05 * (1 - threshold)
        assert (similarity >= threshold - 1e-9).all()
    assert layers.any()


def test_sentences_of_equal_sensitivity_need_no_margin() -> None:
    trial = Trial(1.0)
    found = reckoned(trial.distances, trial.errors(np.ones((100, 3), bool)))
    assert found(0.5) == pytest.approx(1.15 * 0.5)


def test_what_is_reckoned_with_is_the_mean_times_that_of_the_worst() -> None:
    """By hand: at one distance 18 sentences with an error of 0.1, one with 0.3 and one with 0.5; a sentence's own maps do not count."""
    assert WORST == 0.1
    errors = np.array([0.1] * 18 + [0.3, 0.5, 0.0])
    found = reckoned(np.array([0.4] * 20 + [0.0]), errors)
    assert found(0.4) == pytest.approx(0.4)
    assert found(0.0) == 0
    assert reckoned(np.zeros(2), np.zeros(2))(1.0) == 0


def test_beyond_the_distances_of_held_out_sentences_no_maps_are_taken() -> None:
    trial = Trial(1.0)
    layers, similarity = calibrated(trial).accepted(np.array([1.0, 1.01, 100.0]), 0.8)
    assert layers.any(1).tolist() == [True, False, False]
    assert similarity[1:].tolist() == [-np.inf, -np.inf]
    trial.distances = trial.variations = np.zeros(100)
    layers, _ = calibrated(trial).accepted(np.array([0.0005, 0.1]), 0.8)
    assert layers.any(1).tolist() == [True, False]


def test_without_a_neighbour_only_own_maps_are_taken() -> None:
    nothing = Trial(1.0)
    nothing.distances = nothing.distances[:0]
    layers, _ = calibrated(nothing).accepted(np.array([0.0, 0.1]), 0.99)
    assert layers.tolist() == [[True] * 3, [False] * 3]


def test_settings_come_back(tmp_path: Path) -> None:
    kept = settings("layers")
    kept.save(tmp_path)
    assert MemoSettings.load(tmp_path) == kept
    (tmp_path / "memo.json").write_text("{}")
    with pytest.raises(DamageError, match="build the database anew"):
        MemoSettings.load(tmp_path)


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [1, 2, 3], "012", None])
def test_layers_that_are_not_each_named_once_are_damage(tmp_path: Path, order: object) -> None:
    settings("layers").save(tmp_path)
    path = tmp_path / "memo.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"order": order}))
    with pytest.raises(DamageError, match="build the database anew"):
        MemoSettings.load(tmp_path)
    path.write_text('["errors", "format"]')
    with pytest.raises((DamageError, ConfigError), match="build the database anew"):
        MemoSettings.load(tmp_path)


def test_thresholds_of_another_meaning_are_refused(tmp_path: Path) -> None:
    """Files of older versions have an error for each layer, and no `format`."""
    settings("layers").save(tmp_path)
    path = tmp_path / "memo.json"
    value = json.loads(path.read_text())
    del value["format"], value["order"]
    path.write_text(json.dumps(value))
    with pytest.raises(
        ConfigError, match=r"memo.json was calibrated by another version's rule; build the database anew"
    ):
        MemoSettings.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projector": "cnn"}, "--projector must be one of positions, binned, public, got 'cnn'"),
        ({"accept": "heads"}, "--accept must be one of"),
        ({"neighbours": 0}, "--neighbours must lie between 1 and 64, got 0"),
        ({"label": "l3"}, "--label must be one of"),
        ({"max_bytes": 0}, "--max-bytes"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoOptions(**options)  # type: ignore[arg-type]
