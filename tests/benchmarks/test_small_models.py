"""Passes of small models with maps: the rows of a run, and the hit rate from which on they are faster."""

from __future__ import annotations

import pytest
from benchmarks.papers.attncache import random_models, small_models


def rows(*gains: float) -> list[dict[str, object]]:
    about = {"model": "m", "weights": "int8", "tokens": 16}
    return [{**about, "hit_rate": rate, "pass": gain} for rate, gain in zip((0.1, 0.5, 0.9), gains, strict=True)]


@pytest.mark.parametrize(
    ("gains", "rate"),
    [
        ((0.9, 1.1, 1.3), 0.3),  # half way
        ((1.0, 1.1, 1.3), 0.1),
        ((0.9, 0.95, 0.99), None),
        ((1.01, 0.99, 1.03), 0.6),  # noise at the lowest rate is no gain
    ],
)
def test_the_hit_rate_from_which_on_maps_pay(gains: tuple[float, ...], rate: float | None) -> None:
    (found,) = small_models.break_even(rows(*gains))
    assert found == {
        "what": "break-even",
        "model": "m",
        "weights": "int8",
        "tokens": 16,
        "hit_rate": rate,
        "most": gains[-1],
    }


def test_both_kinds_of_models_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder and an encoder, of tiny shapes."""
    tiny = {"SmolLM2-135M": (64, 4, 2, 96, 2, 10000.0), "BERT base": (64, 4, 4, 96, 2, None)}
    monkeypatch.setattr(random_models, "SHAPES", tiny)
    found, goals = small_models.measure(["none"], quick=True, seed=0)
    passes = [row for row in found if row["what"] == "pass"]
    assert [(row["model"], row["hit_rate"]) for row in passes] == [(m, r) for m in tiny for r in small_models.RATES]
    assert all(row["pass"] > 0 for row in passes)
    assert [row["model"] for row in found if row["what"] == "break-even"] == list(tiny)
    assert [goal["goal"] for goal in goals] == [">= 1.15"] * 2
    assert "how much faster" in capsys.readouterr().out
