"""Weights that are floats of 8 bits, with a scale for each output: rounded here, and refused where a device has no such floats."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch

from afterglow.choices import KeptWeights
from afterglow.errors import ConfigError
from afterglow.kernels.device_products import FLOAT8, Kind, RoundedFilling, RoundedMatrix, rounded_rows
from afterglow.model.digest import numeric_mode
from afterglow.model.keeping import Keeping
from afterglow.model.loader import load_model, weight_bytes
from afterglow.model.presets import PRESETS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_weights_are_rounded_to_three_bits_behind_the_point_of_each_outputs_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(300, 70, generator=generator) * torch.logspace(-6, 6, 300)[:, None]
    exact[5] = 0
    numbers, scale = rounded_rows(exact, 8, False, True)
    assert (numbers.dtype, scale.dtype, scale.shape) == (FLOAT8, torch.float32, (300, 1))
    matrix = RoundedMatrix(numbers, scale, 70)
    assert matrix.kind == Kind(8, 0, torch.float32, coded=True)
    found, most = matrix.widened(0, 300, torch.float32), exact.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found.abs().amax(1, keepdim=True), most, rtol=1e-6, atol=0)
    # Half of the last of four bits; below the least normal number, 2 ** -6, half of 2 ** -9, in units of the scale.
    assert ((found - exact).abs() <= torch.maximum(exact.abs() / 16, most / 448 / 2**10) * 1.001).all()
    assert not found[5].any()
    again, scale_again = rounded_rows(found, 8, False, True)
    torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0)
    assert torch.equal(again.float(), numbers.float()), "rounded twice is rounded once"


def test_a_matrix_that_is_filled_in_parts_is_the_whole_one() -> None:
    exact = torch.randn(600, 40, generator=torch.Generator().manual_seed(1))
    filling = RoundedFilling(600, 40, CPU, 8, grouped=False, floats=True)
    filling.fill(0, exact[:7].bfloat16())
    filling.fill(7, exact[7:])
    bias, x = torch.randn(600), torch.randn(3, 40)
    matrix = filling.done(bias)
    assert matrix.num_bytes == 600 * (40 + 4)
    wanted = torch.cat([rounded_rows(part, 8, False, True)[0].float() for part in (exact[:7].bfloat16(), exact[7:])])
    assert torch.equal(matrix.numbers.float(), wanted)
    torch.testing.assert_close(matrix(x), x @ matrix.widened(0, 600, torch.float32).T + bias)
    part = matrix.rows(100, 200)
    assert part.kind == matrix.kind
    torch.testing.assert_close(part(x), matrix(x)[:, 100:200])
    ids = torch.tensor([5, 599, 5])
    assert torch.equal(matrix.looked_up(ids, torch.float32), matrix.widened(0, 600, torch.float32)[ids])


def test_a_device_without_such_floats_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or more, not a CPU; use --quantization int8"):
        load_model("tiny", quantization="float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"8.9 or more, not cuda:0 with 8\.6; use --quantization int8"):
        Keeping(torch.bfloat16, CUDA, "float8")
    for enough in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=enough: found)
        assert Keeping(torch.bfloat16, CUDA, "float8").kept == "float8 alone"


def test_it_is_a_namespace_and_a_size_of_its_own() -> None:
    kinds: tuple[KeptWeights, ...] = get_args(KeptWeights)
    assert "float8 alone" in kinds
    assert len({numeric_mode("torch.bfloat16", "torch.bfloat16", kind) for kind in kinds}) == len(kinds)
    spec = dataclasses.replace(PRESETS["tiny"], dtype="bfloat16", tied_embeddings=False)
    eight, other = (weight_bytes(spec, torch.bfloat16, CUDA, each, None) for each in ("float8", "int8"))
    assert eight == other
