"""Equation 2 in its three readings, on matrices small enough to compute by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.memo.distances import label, labels, total_variation

# One layer, one head, two tokens. Row 1: no difference. Row 2: (0.5, 0.5) against (0.9, 0.1), 0.4 and -0.4 apart.
A = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
B = torch.tensor([[[[1.0, 0.0], [0.9, 0.1]]]])
ONE_TOKEN = torch.ones(1, 1, 1, 1)


def test_total_variation_is_half_the_l1_distance() -> None:
    assert label(A, B, "tv") == pytest.approx((0 + 0.4) / 2)
    assert float(total_variation(A[None], B[None])[0]) == pytest.approx(0.2)


def test_printed_is_half_the_l2_distance_times_alpha() -> None:
    l2 = (0.4**2 + 0.4**2) ** 0.5
    assert label(A, B, "printed", alpha=0.2) == pytest.approx(0.2 * (0 + l2 / 2) / 2, abs=1e-6)
    assert label(A, B, "printed", alpha=1.0) == pytest.approx(l2 / 4, abs=1e-6)


def test_public_is_total_variation_at_equal_length() -> None:
    assert label(A, B, "public") == pytest.approx(0.2)


@pytest.mark.parametrize(("mode", "apart"), [("tv", 0.2), ("printed", 1.0), ("public", 1.0)])
def test_what_a_token_more_costs(mode: str, apart: float) -> None:
    # Padded, the single token's map is [[1, 0], [0, 0]]: its second row differs from A's by (0.5, 0.5).
    maps = 0.2 * (0.5**2 + 0.5**2) ** 0.5 / 2 / 2 if mode == "printed" else 0.5 / 2
    assert label(A, ONE_TOKEN, mode, alpha=0.2) == pytest.approx(maps + apart, abs=1e-6)  # type: ignore[arg-type]


def test_layers_and_heads_count_alike() -> None:
    both: Tensor = torch.cat((A, B), 1)
    assert label(both, torch.cat((A, A), 1)) == pytest.approx(0.1)
    assert label(torch.cat((A, B)), torch.cat((A, A))) == pytest.approx(0.1)


def test_pairs_are_symmetric_and_nothing_is_apart_from_itself() -> None:
    maps = [torch.rand(2, 3, s, s, generator=torch.Generator().manual_seed(s)).softmax(-1) for s in (4, 4, 6)]
    for mode in ("tv", "printed", "public"):
        found = labels(maps, mode)
        torch.testing.assert_close(found, found.T)
        assert float(found.diagonal().abs().max()) < 1e-6
        assert found[0, 2] == pytest.approx(label(maps[0], maps[2], mode), abs=1e-6)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigError, match="tv, printed, public, got 'tvd'"):
        label(A, B, "tvd")  # type: ignore[arg-type]
