"""Weights rounded to blocks: near to what they were, nearer than a scale that only fits the largest number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afterglow.kernels import block_rounding
from afterglow.kernels.block_rounding import round_to_blocks
from afterglow.kernels.built import native
from afterglow.kernels.packed import dequantize


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to round."""
    if request.param == "torch":
        monkeypatch.setattr(block_rounding, "native", lambda: None)
    elif native() is None:
        pytest.skip("there are no compiled kernels")


def blocks_of(seed: int = 0) -> Tensor:
    """Normally distributed weights of very different sizes, with zeros, ties and single numbers."""
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-4, 3, 40)[:, None]
    weight[3] = 0
    weight[4, :32] = torch.arange(32) - 16.0
    weight[5, 1:] = 0
    weight[6, 40] = -1e-3
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_8_bits_are_the_nearest_of_their_scale(dtype: torch.dtype) -> None:
    weight = blocks_of().to(dtype)
    found = dequantize(round_to_blocks(weight, "Q8_0"), "Q8_0")
    peak = weight.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    # Half a step, and the scale's own rounding: 2^-11 of it, or 2^-25 where float16 has no more digits.
    bound = (peak / 254 + peak * 2**-11 + 127 * 2**-25).expand(-1, -1, 32).flatten(1)
    assert ((found - weight.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_4_bits_are_nearer_than_by_the_largest_number(dtype: torch.dtype) -> None:
    weight = blocks_of().to(dtype)
    exact = weight.float().unflatten(1, (-1, 32))
    found = dequantize(round_to_blocks(weight, "Q4_0"), "Q4_0").unflatten(1, (-1, 32))
    scale = exact.gather(-1, exact.abs().argmax(-1, keepdim=True)) / -8
    plain = torch.where(scale == 0, 0, exact / scale).round().clamp(-8, 7) * scale
    errors, plain_errors = ((about - exact).square().sum(-1) for about in (found, plain))
    # A block may lose by its scale's rounding to float16, all together win: 6 % on normally distributed numbers.
    assert (errors <= plain_errors * 1.01 + exact.square().sum(-1) * 1e-6 + 32 * (8 * 2**-25) ** 2).all()
    whole = exact.square().sum(-1)
    assert (errors / whole.clamp_min(1e-30)).mean() < 0.9 * (plain_errors / whole.clamp_min(1e-30)).mean()


def test_a_row_is_rounded_alone_and_into_its_place() -> None:
    weight = blocks_of()
    whole = round_to_blocks(weight, "Q4_0")
    out = torch.zeros_like(whole)
    for start in range(0, 40, 7):
        round_to_blocks(weight[start : start + 7], "Q4_0", out[start : start + 7])
    assert torch.equal(out, whole)


def test_inputs_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="33 inputs"):
        round_to_blocks(torch.ones(2, 33), "Q4_0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_format", ["Q4_0", "Q8_0"])
def test_both_ways_round_alike(block_format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are added up in another order, so that of two scales that are equally good another one may be taken."""
    weight = blocks_of().to(dtype)
    found = round_to_blocks(weight, block_format)
    monkeypatch.setattr(block_rounding, "native", lambda: None)
    wanted = round_to_blocks(weight, block_format)
    assert (found != wanted).float().mean() < 0.01
    errors = [(dequantize(blocks, block_format) - weight.float()).norm(dim=1) for blocks in (found, wanted)]
    torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-7)
