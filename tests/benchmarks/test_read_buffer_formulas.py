"""The read buffer's formulas: no stall with the exact one, at most one layer's with the printed one."""

from __future__ import annotations

import pytest
from benchmarks.papers.cachedattention.read_buffer import stall
from hypothesis import given
from hypothesis import strategies as st

from afterglow.plan.tiers.buffers import read_buffer_layers

LAYERS = st.integers(1, 60)
SECONDS = st.floats(0.01, 10)


@given(LAYERS, SECONDS, SECONDS)
def test_the_exact_buffer_is_the_least_without_a_stall(layers: int, load: float, compute: float) -> None:
    # Stall(k*) = 0 and stall(k* - 1) > 0, up to rounding.
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
