"""Weights that are floats of 8 bits, with a scale for each output: rounded here, or read from checkpoints; on devices that have them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from afterglow.choices import KeptWeights
from afterglow.errors import ConfigError, ModelError
from afterglow.kernels.device_products import FLOAT8, Kind, RoundedFilling, RoundedMatrix, rounded_rows
from afterglow.model.digest import numeric_mode
from afterglow.model.keeping import Keeping
from afterglow.model.loader import load_model, weight_bytes
from afterglow.model.presets import PRESETS, save_hf
from tests.model.test_quantized import SPEC, Case, change, logits, refused, write


class Floats(NamedTuple):
    """A matrix as a quantiser has it."""

    numbers: Tensor
    scale: Tensor

    def weights(self) -> Tensor:
        return self.numbers.float() * self.scale.float()

    def tensors(self, shape: tuple[int, ...], name: str) -> dict[str, Tensor]:
        return {"weight": self.numbers, name: self.scale.reshape(shape), "input_scale": torch.ones(1)}


def case(
    config: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, name: str = "weight_scale"
) -> Case:
    """`shape`: of a matrix's scale, or scales."""

    def rounded(weight: Tensor) -> Floats:
        most = weight.abs().amax(1, keepdim=True) if -1 in shape else weight.abs().amax().view(1, 1)
        scale = (most / 448).to(dtype)
        return Floats((weight / scale.float()).clamp(-448, 448).to(FLOAT8), scale)

    return Case(rounded, lambda it: it.tensors(shape, name), config)


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    rows = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights | more, "input_activations": rows}
    about = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", **about}


CASES = {
    "floats by output": case(compressed("channel"), (-1, 1), torch.bfloat16),
    "floats by tensor": case(compressed("tensor"), (1,)),
    "fp8": case({"quant_method": "fp8", "activation_scheme": "static"}, ()),
    "fp8 of transformers": case(
        {"quant_method": "fp8", "weight_block_size": None}, (), torch.bfloat16, "weight_scale_inv"
    ),
    "fp8 by output": case({"quant_method": "fp8", "activation_scheme": "dynamic"}, (-1,)),
}

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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model before quantisation."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_hf(SPEC, folder)
    return folder


@pytest.mark.parametrize("form", CASES.values(), ids=CASES)
def test_a_checkpoint_of_floats_is_dequantised_on_a_cpu(plain: Path, tmp_path: Path, form: Case) -> None:
    packed, exact = write(plain, tmp_path, form)
    wanted = logits(exact)
    assert torch.equal(logits(packed), wanted)
    assert torch.equal(logits(packed, "none"), wanted)
    assert torch.equal(logits(packed, "int8"), logits(exact, "int8"))
    assert load_model(packed).quantization == "none"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        (compressed("group"), ("strategy of weights = 'group'", "channel, tensor")),
        (compressed("block"), ("strategy of weights = 'block'",)),
        (compressed("channel", num_bits=4), ("num_bits of weights = 4",)),
        (compressed("channel") | {"format": "pack-quantized"}, ("pack-quantized", "float-quantized")),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ("fmt = 'e5m2'",)),
    ],
)
def test_other_floats_are_refused_by_name(
    plain: Path, tmp_path: Path, about: dict[str, Any], expected: tuple[str, ...]
) -> None:
    packed, _ = write(plain, tmp_path, CASES["fp8"]._replace(config=about))
    refused(packed, "quantised", *expected)


def test_a_config_that_was_copied_from_another_checkpoint(plain: Path, tmp_path: Path) -> None:
    packed, _ = write(plain, tmp_path, CASES["fp8 by output"])
    change(packed, weight_scale=None, qweight=torch.zeros(16, 128, dtype=torch.int32))
    refused(packed, "o_proj: there is no scale of its floats of 8 bits", "weight_scale")


def test_groups_of_integers_and_floats_are_refused(plain: Path, tmp_path: Path) -> None:
    about = compressed("channel")
    about["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    packed, _ = write(plain, tmp_path, CASES["fp8"]._replace(config=about))
    refused(packed, "type of weights = 'int'", "supported: float")


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"weight": torch.zeros(128, 96).to(FLOAT8)}, ("o_proj.weight", "expected is (128, 128)")),
        ({"weight": torch.zeros(128, 128)}, ("o_proj.weight", "torch.float8_e4m3fn")),
        ({"weight_scale": torch.ones(64, 2)}, ("o_proj: its tensors make no quantised matrix",)),
        ({"weight_scale": torch.ones(3)}, ("o_proj: its tensors make no quantised matrix",)),
        ({"weight_scale": None}, ("o_proj.weight", "F8_E4M3")),
    ],
)
def test_damaged_floats_are_refused(
    plain: Path, tmp_path: Path, tensors: dict[str, Tensor | None], expected: tuple[str, ...]
) -> None:
    packed, _ = write(plain, tmp_path, CASES["fp8 by output"])
    change(packed, **tensors)
    refused(packed, *expected)


def test_memory_is_asked_for_as_weights_are_kept(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantised on a CPU; a machine that holds the file alone is told so."""
    packed, _ = write(plain, tmp_path, CASES["fp8"])
    size = (packed / "model.safetensors").stat().st_size
    monkeypatch.setattr("afterglow.model.loader.free_bytes", lambda: 2 * size)
    with pytest.raises(ModelError, match="weights need about"):
        load_model(packed)
