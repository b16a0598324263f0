"""Learning what loading and computing take, and the read buffer's formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.plan.cost import Cost, Fit, read_buffer_layers, stall, write_buffer_bytes


def test_a_fit_finds_the_weights() -> None:
    fit = Fit(3, 0.95)
    assert fit.predict((1, 1, 1)) is None
    for i in range(1, 30):
        features = (1.0, float(i), float(i * i % 7))
        fit.add(features, 0.5 + 0.02 * features[1] + 0.3 * features[2])
    assert fit.predict((1, 100, 5)) == pytest.approx(0.5 + 2.0 + 1.5, rel=1e-3)


def test_a_fit_never_says_that_more_takes_less() -> None:
    fit = Fit(2, 0.95)
    for size in (1.0, 2.0, 3.0):
        fit.add((1.0, size), 4.0 - size)
    first, second = fit.predict((1, 1)), fit.predict((1, 50))
    assert first is not None
    assert second is not None
    assert 0 <= first <= second


def test_a_fit_follows_a_change() -> None:
    fit = Fit(2, 0.85)
    for size in range(1, 60):
        fit.add((1.0, size), 0.1 * size)
    for size in range(1, 60):
        fit.add((1.0, size), 0.4 * size)
    assert fit.predict((0, 10)) == pytest.approx(4.0, rel=0.3)


def test_loads_follow_one_another() -> None:
    cost = Cost(layers=4)
    for move in range(3):
        cost.started(move, 1000, now=float(move))
        cost.ended(move, 1000, 1.0, now=float(move) + 1)
    cost.started(7, 2000, now=10.0)
    assert cost.remaining(7, now=10.5) == pytest.approx(1.5, rel=0.01)
    assert cost.loads([1000], now=10.5) == pytest.approx(2.5, rel=0.01)
    cost.ended(7, 2000, 2.0, now=12.0)
    assert cost.loads([1000], now=20.0) == pytest.approx(1.0, rel=0.01)
    assert cost.remaining(7, now=20.0) == 0


LAYERS = st.integers(1, 60)
SECONDS = st.floats(0.01, 10)


@given(LAYERS, SECONDS, SECONDS)
def test_the_exact_buffer_is_the_least_without_a_stall(layers: int, load: float, compute: float) -> None:
    # Spec A4: stall(k*) = 0 and stall(k* - 1) > 0, up to rounding.
    wanted = read_buffer_layers(layers, load, compute)
    assert stall(layers, load, compute, wanted) <= 1e-9 * layers * load
    if wanted > 1 or layers * load > (layers - 1) * compute:
        assert stall(layers, load, compute, wanted - 1) > 0


@given(LAYERS, SECONDS, SECONDS)
def test_the_papers_buffer_leaves_at_most_one_layers_compute(layers: int, load: float, compute: float) -> None:
    buffered = read_buffer_layers(layers, load, compute, exact=False)
    assert buffered <= read_buffer_layers(layers, load, compute)
    assert stall(layers, load, compute, buffered) <= compute + load * 1e-6


def test_the_papers_example() -> None:
    # 13B, 40 layers, 16 x 1K history and 100 new tokens (Fig. 19): no buffer -37 %, 15 layers -61 % and no stall.
    layers, load, ratio = 40, 0.504 / 40, 0.6376
    compute = ratio * load
    sequential = layers * (load + compute)

    def saved(buffered: int) -> float:
        return 1 - (layers * compute + stall(layers, load, compute, buffered)) / sequential

    assert saved(0) == pytest.approx(0.37, abs=0.02)
    assert saved(15) == pytest.approx(0.61, abs=0.01)
    assert read_buffer_layers(layers, load, compute) == 16
    assert stall(layers, load, compute, 16) == 0


def test_the_write_buffer_holds_what_is_left() -> None:
    assert write_buffer_bytes(2.0, 0.5, 100.0, limit=1000) == 150
    assert write_buffer_bytes(2.0, 3.0, 100.0, limit=1000) == 0
    assert write_buffer_bytes(90.0, 0.5, 100.0, limit=1000) == 1000
