"""The rotation against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afterglow.kernels.rope import RopeTable, rotate, rotate_into


def table(dim: int, factor: float = 1.0) -> RopeTable:
    powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return RopeTable(1.0 / 10000.0**powers, attention_factor=factor)


def reference(x: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
    """Dimension i and i + dim/2 are one complex number, turned by position * inv_freq[i]."""
    half = rope.dim // 2
    # The product is rounded to float32 here as well, as every implementation does.
    angles = (positions.float()[:, None] * rope.inv_freq).double()[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double()) * torch.polar(
        torch.full_like(angles, rope.attention_factor), angles
    )
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), -1)


@pytest.mark.parametrize("dim", [2, 8, 16])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_rotation(dim: int, factor: float) -> None:
    rope = table(dim, factor)
    positions = torch.tensor([0, 1, 7, 4095, 100_000])
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(
        rotate(x, rope.cos_sin(positions)).double(), reference(x, positions, rope), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_rotate_into_a_strided_segment(dim: int, stored: torch.dtype, wanted: torch.dtype) -> None:
    rope = table(dim)
    positions = torch.arange(100, 140)
    x = torch.randn(40, 2, 16).to(stored)
    segment = torch.full((2, 64, 16), 7.0, dtype=wanted)
    rotate_into(x, rope.cos_sin(positions), segment[:, 10:50].transpose(0, 1))
    expected = reference(x, positions, rope)
    # One rounding at the end: exactly the rounded float32 result.
    tolerance = 2e-6 if wanted == torch.float32 else 2**-8
    torch.testing.assert_close(segment[:, 10:50].transpose(0, 1).double(), expected, atol=2e-6, rtol=tolerance)
    assert (segment[:, :10] == 7).all()
    assert (segment[:, 50:] == 7).all()


def test_scores_depend_on_the_distance_only() -> None:
    """What makes keys stored without positions reusable anywhere."""
    rope = table(16)
    q, k = torch.randn(2, 1, 1, 16).unbind(0)

    def score(at: int, distance: int) -> Tensor:
        turned = [rotate(t, rope.cos_sin(torch.tensor([p]))) for t, p in ((q, at + distance), (k, at))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(0, 5), score(2000, 5), atol=1e-3, rtol=0)
    assert (score(0, 5) - score(0, 6)).abs() > 1e-2


def test_positions_do_not_alias() -> None:
    """A bfloat16 anywhere on the way would make neighbours equal."""
    cos, _ = table(16).cos_sin(torch.arange(8192))
    assert cos.dtype == torch.float32
    assert len(torch.unique(cos[:, 0])) > 8000


def test_a_table_must_be_float32() -> None:
    with pytest.raises(ValueError, match="float32"):
        RopeTable(torch.ones(4, dtype=torch.bfloat16))
