"""When `auto` uses attention maps: by what passes with and without them take."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from afterglow.errors import ConfigError
from afterglow.memo.break_even import MOST_ROUNDS, ROUNDS, expected_rates, measure, measure_curve
from afterglow.memo.build import Builder
from afterglow.memo.database import Found, MemoDatabase
from afterglow.memo.memo_settings import SETTINGS, MemoSettings
from afterglow.memo.options import MemoOptions
from afterglow.memo.texts import TextEmbedder, memo_identity, text_embedder
from afterglow.model.decoder import Attention
from afterglow.model.loader import load_encoder
from afterglow.text import Tokenizer
from tests.memo.kit import build, embedder, sentences
from tests.memo.tiny import tiny_encoder


def row(threshold: float, hit_rate: float, layer_rate: float) -> dict[str, float]:
    return {"threshold": threshold, "hit_rate": hit_rate, "layer_rate": layer_rate, "error": 0.0, "variation": 0.0}


CURVE = [row(0.99, 0.25, 0.125), row(0.95, 0.5, 0.5), row(0.9, 1.0, 0.5)]


def with_curve(settings: MemoSettings, curve: list[dict[str, float]]) -> MemoSettings:
    return dataclasses.replace(settings, curve=curve)


def test_rates_are_those_of_the_threshold_or_the_next_higher(tmp_path: Path) -> None:
    settings = with_curve(build(embedder("encoder"), tmp_path, sentences(20)).settings, CURVE)
    assert expected_rates(settings, 0.99) == (0.25, 0.125)
    assert expected_rates(settings, 0.97) == (0.25, 0.125)
    assert expected_rates(settings, 0.9) == (1.0, 0.5)
    assert expected_rates(settings, 0.5) == (1.0, 0.5)
    assert expected_rates(settings, 0.999) == (0.0, 0.0)  # nothing is known so far up: as if nothing were found


class Ticks:
    """A clock that advances with the rows for which queries and keys are computed, and with each search."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.search = 0.0, 0.0
        project, find = Attention.project, MemoDatabase.find

        def counted(this: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            self.now += len(x)
            return project(this, x)

        def searched(this: MemoDatabase, inputs: torch.Tensor, threshold: float) -> Found:
            self.now += self.search
            return find(this, inputs, threshold)

        monkeypatch.setattr(Attention, "project", counted)
        monkeypatch.setattr(MemoDatabase, "find", searched)

    def __call__(self) -> float:
        return self.now


def test_passes_take_maps_at_the_expected_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = embedder("encoder")
    database = build(plain, tmp_path, sentences(40, lengths=(8,)))
    database.settings = with_curve(database.settings, CURVE)
    clock = Ticks(monkeypatch)
    for threshold, saved in ((0.99, 0.125), (0.95, 0.5), (0.9, 0.5), (0.999, 0.0)):
        gain = measure(plain, database, threshold, clock=clock)
        assert gain.speedup == pytest.approx(1 / (1 - saved))
        assert gain.pays is (saved == 0.5)  # 1.14 times as fast is not enough
    clock.search = 1000.0  # slower to look up than to compute
    assert not measure(plain, database, 0.95, clock=clock).pays
    assert database.stats == {"sentences": 0, "hits": 0, "layers_hit": 0, "damaged": 0}


def test_a_curve_is_measured_once_for_equal_rates(tmp_path: Path) -> None:
    plain = embedder("encoder")
    database = build(plain, tmp_path, sentences(40, lengths=(8,)))
    database.settings = with_curve(database.settings, [*CURVE, row(0.85, 1.0, 0.5), row(0.8, 0.0, 0.0)])
    measure_curve(plain, database)
    curve = json.loads((tmp_path / SETTINGS).read_text())["curve"]
    assert [("speedup" in one) for one in curve] == [True, True, True, True, False]
    assert curve[2]["speedup"] == curve[3]["speedup"] > 0
    measure_curve(plain, with_rows := database, seconds=-1.0)
    assert with_rows.settings.curve[0]["speedup"] > 0  # the default threshold's, whatever it takes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tiny_encoder(tmp_path_factory.mktemp("model"))
    model = opened(folder)
    maps = tmp_path_factory.mktemp("memo") / "maps"
    texts = [f"the {a} is near the {b}" for a in ("cat", "dog", "mill") for b in ("river", "mat", "rain", "kite")]
    identity = memo_identity(model.embedder.model, folder, model.template)
    Builder(model.embedder, maps, MemoOptions(steps=5), **identity).run([model.tokens(text) for text in texts])
    return folder, maps


def opened(folder: Path, **more: object) -> TextEmbedder:
    return text_embedder(load_encoder(folder), folder, Tokenizer(folder), "tiny", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("speed", "used"), [(1.15, True), (1.14, False), (0.8, False)])
def test_auto_uses_maps_where_passes_are_at_least_1_15_times_as_fast(
    speed: float,
    used: bool,
    made: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from afterglow.memo import break_even, texts

    real = break_even.measure

    def skewed(*args: object) -> break_even.Gain:
        return dataclasses.replace(real(*args), speedup=speed)  # type: ignore[arg-type]

    monkeypatch.setattr(texts, "measure", skewed)
    with caplog.at_level(logging.INFO, "afterglow.memo"):
        model = opened(made[0], memo=made[1], threshold=0.5, memo_mode="auto")
    assert model.memo is not None
    assert (model.memo.used, model.memo.mode) == (used, "auto")
    assert (model.embedder.memo is not None) is used
    assert f"{speed:.2f} times as fast" in caplog.text
    result = model.embed(["the cat is near the river"])
    assert result.memo_hits == int(used)


def test_on_and_off_measure_nothing(made: tuple[Path, Path]) -> None:
    for mode, hits in (("on", 1), ("off", 0)):
        model = opened(made[0], memo=made[1], threshold=0.5, memo_mode=mode)
        assert model.memo is not None
        assert model.memo.gain is None
        assert model.embed(["the cat is near the river"]).memo_hits == hits
    with pytest.raises(ConfigError, match="got 'never'"):
        opened(made[0], memo=made[1], memo_mode="never")


def test_measuring_ends(made: tuple[Path, Path]) -> None:
    """However fast passes are, and however slow."""
    model = opened(made[0], memo=made[1], threshold=0.5)
    assert model.memo is not None
    for seconds in (1e-9, 100.0):
        calls: list[float] = []

        def clock(calls: list[float] = calls, seconds: float = seconds) -> float:
            calls.append(seconds)
            return sum(calls)

        measure(model.embedder, model.memo.database, 0.5, clock=clock)
        assert len(calls) == 4 * (1 + (MOST_ROUNDS if seconds < 1 else ROUNDS))
    assert np.isfinite(measure(model.embedder, model.memo.database, 1.0).speedup)
