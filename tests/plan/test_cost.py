"""Learning what loading and computing take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afterglow.plan.tiers.cost import Cost, Fit, Work


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
    assert cost.coming([7], [], now=10.5)[1] == pytest.approx(1.5, rel=0.01)
    assert cost.loads([1000], now=10.5) == pytest.approx(2.5, rel=0.01)
    cost.ended(7, 2000, 2.0, now=12.0)
    assert cost.loads([1000], now=20.0) == pytest.approx(1.0, rel=0.01)
    assert cost.coming([7], [], now=20.0) == (0, 0)


def reading(readers: int, layers: int = 4, latency: float = 0.5) -> Cost:
    """It knows that a read takes so long, and a second more for a thousand bytes."""
    cost = Cost(layers, readers)
    for move in range(40):
        size = 1000 * (1 + move % 4)
        cost.started(-move, size, now=10.0 * move)
        cost.ended(-move, size, latency + size / 1000, now=10.0 * move + 9)
    return cost


def test_loads_are_shared_among_readers() -> None:
    ends = [reading(readers).loads([1000] * 4, now=1000) for readers in (1, 2, 3, 4, 9)]
    assert ends == pytest.approx([6, 3, 3, 1.5, 1.5], rel=0.01)


def test_a_further_load_waits_for_the_reader_that_is_free_first() -> None:
    cost = reading(2)
    cost.started(1, 8000, now=1000)
    cost.started(2, 1000, now=1000)
    assert cost.loads([1000], now=1000) == pytest.approx(3, rel=0.01)
    assert cost.coming([1, 2], [], now=1000)[1] == pytest.approx(8.5, rel=0.01)
    assert cost.coming([2], [cost.read(1000)], now=1001)[1] == pytest.approx(2, rel=0.01)


def test_the_first_layer_comes_after_the_latency_and_after_the_loads_before() -> None:
    cost = reading(1)
    assert cost.coming([], [cost.read(4000)], now=1000) == pytest.approx((0.5 + 4 / 4, 4.5), rel=0.01)
    assert cost.coming([], [cost.read(4000)] * 3, now=1000) == pytest.approx((9 + 0.5 + 4 / 4, 13.5), rel=0.01)
    assert reading(1, layers=1).coming([], [4.5], now=1000) == pytest.approx((4.5, 4.5), rel=0.01)


def test_nothing_is_waited_for_where_nothing_is_loaded() -> None:
    cost = reading(2)
    assert cost.coming([], [], now=1000) == (0, 0)
    assert cost.loads([], now=1000) == 0
    cost.started(1, 1000, now=1000)
    assert cost.coming([], [], now=1000) == (0, 0)


def test_what_is_overdue_is_taken_to_need_as_long_again() -> None:
    cost = reading(1)
    cost.started(1, 1000, now=1000)
    waits = [cost.coming([1], [], now=1000 + after)[1] for after in (0, 1, 1.5, 2, 11.5)]
    assert waits == pytest.approx([1.5, 0.5, 0, 0.5, 10], abs=0.02)


def test_what_was_predicted_is_forgotten_when_all_loads_have_ended() -> None:
    cost = reading(2)
    for move in (1, 2, 3):
        cost.started(move, 8000, now=1000)
    for move in (1, 2, 3):
        cost.ended(move, 0, 0.0, now=1001)  # they failed
    assert cost.loads([1000], now=1001) == pytest.approx(1.5, rel=0.01)


def test_a_failed_load_teaches_nothing() -> None:
    cost = Cost(4)
    for move in range(9):
        cost.started(move, 1000, now=0)
        cost.ended(move, 0, 5.0, now=1)
        cost.passed(Work(10, 100.0, 0), 1.0)
    assert not cost.known
    assert cost.read_rate is None


def test_nothing_is_known_before_both_have_been_measured() -> None:
    cost = reading(1)
    assert not cost.known
    assert cost.read_rate == pytest.approx(1000, rel=0.01)
    assert (cost.prefill_rate, cost.compute(100, 0)) == (None, 0)
    for rows in (10, 20, 40):
        assert not cost.known
        work = Work()
        work.add(rows, 0)
        cost.passed(work, rows / 100)
    assert cost.known
    assert cost.prefill_rate == pytest.approx(100, rel=0.1)


def test_attention_is_told_from_rows() -> None:
    cost = Cost(4)
    for rows in (16, 64, 200, 512):
        for start in (0, 1000, 4000):
            work = Work()
            work.add(rows, start)
            cost.passed(work, 0.001 + 1e-4 * rows + 1e-7 * rows * (start + rows / 2))
    assert cost.compute(100, 8000) == pytest.approx(0.001 + 0.01 + 1e-7 * 100 * 8050, rel=0.02)
    assert cost.gather(100) == pytest.approx(0, abs=1e-6)


def test_gathering_is_told_from_computing() -> None:
    cost = Cost(4)
    for rows in (1, 64, 200):
        for gathered in (0, 500, 3000):
            work = Work()
            work.add(rows, gathered, gathered)
            cost.passed(work, 0.001 + 1e-4 * rows + 1e-6 * gathered)
    assert cost.gather(1000) == pytest.approx(1e-3, rel=0.05)


def test_gathers_of_a_few_rows_say_nothing_of_many() -> None:
    """What passes take by chance, told of four rows, would make a thousand rows take longer than computing them."""
    cost = Cost(4)
    for turn in range(20):
        rows = 900 + 10 * turn
        gathered = 4 * (turn % 2)
        cost.passed(Work(rows, 0.0, gathered), 1e-3 * rows * (1.05 if gathered else 1.0))
    assert cost.gather(1000) < 0.1 * cost.compute(1000, 0)
    for turn in range(20):
        cost.passed(Work(100 + turn, 0.0, 600 + 40 * (turn % 3)), 1e-3 * (100 + turn) + 1e-4 * (600 + 40 * (turn % 3)))
    assert cost.gather(1000) == pytest.approx(0.1, rel=0.1)


def test_a_pass_may_begin_when_its_layers_come_in_time() -> None:
    cost = Cost(layers=4)
    assert cost.fits(0, 0, 1)
    assert cost.fits(0.25, 0.75, 1)
    assert not cost.fits(0.26, 0.75, 1)
    assert not cost.fits(0.25, 0.76, 1)
    assert Cost(layers=1).fits(0, 0, 1)
    assert not Cost(layers=1).fits(0, 0.01, 1)


def test_when_a_pass_may_begin_is_known_beforehand() -> None:
    cost = reading(1, layers=4)
    for rows in (100, 200, 400):
        cost.passed(Work(rows), rows / 100)
    cost.started(1, 4000, now=1000)  # until 1004.5
    at = cost.fits_at([1], 2.0, now=1000)
    assert 1000 < at < 1004.5
    for now, fits in ((at - 0.01, False), (at + 0.01, True)):
        assert cost.fits(*cost.coming([1], (), now), 2.0) is fits
    assert cost.fits_at([1], 2.0, now=1006) == 1006  # it is overdue: who knows
    assert reading(1).fits_at([], 2.0, now=7) == 7


@given(st.integers(1, 60), st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0, 10))
def test_a_pass_that_fits_waits_for_a_layers_computing_time_at_most(
    layers: int, load: float, compute: float, ago: float
) -> None:
    """Layers that come one after the other, `load` seconds each, since a while; computing takes `compute` a layer."""
    first, last = max(0.0, load - ago), max(0.0, layers * load - ago)
    if Cost(layers).fits(first, last, layers * compute):
        clock = 0.0
        for layer in range(layers):
            clock = max(clock, (layer + 1) * load - ago) + compute
        assert clock - layers * compute <= compute * (1 + 1e-9)
