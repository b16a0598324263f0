"""Quantised checkpoints: AWQ, GPTQ and compressed-tensors, packed here as their formats are published, load as what they hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.errors import ModelError
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.digest import model_digest, numeric_mode
from afterglow.model.linear import BlockLinear, ReorderedLinear, StackedLinear
from afterglow.model.loader import load_model
from afterglow.model.presets import PRESETS, save_hf
from tests import doors

SPEC = dataclasses.replace(PRESETS["tiny"], qkv_bias=True, out_bias=True, hidden=128, head_dim=32, ffn=256,
                           rope=dataclasses.replace(PRESETS["tiny"].rope, dim=32))  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Rounded(NamedTuple):
    """A matrix as a quantiser has it before packing: weights are scale * (number - zero), by the group of each input."""

    numbers: Tensor  # int64 [outputs, inputs]
    scale: Tensor  # [outputs, groups]
    zero: Tensor  # int64 [outputs, groups]
    group: Tensor  # int64 [inputs]

    def weights(self) -> Tensor:
        return (self.numbers - self.zero[:, self.group]) * self.scale.float()[:, self.group]


def quantise(weight: Tensor, bits: int, group: int, *, sym: bool, act_order: bool = False) -> Rounded:
    """Round by least and largest numbers of each group."""
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    groups = torch.arange(inputs) // size
    if act_order:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs + outputs))]
    count, most = inputs // size, 2**bits - 1
    scale, zero = torch.empty(outputs, count), torch.empty(outputs, count, dtype=torch.int64)
    for index in range(count):
        part = weight[:, groups == index]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if sym:
            high = torch.maximum(high, -low)
            low = -high
        scale[:, index] = ((high - low) / most).half().float()
        zero[:, index] = most // 2 + 1 if sym else (-low / scale[:, index]).round().clamp(1, most).long()
    numbers = (weight / scale[:, groups]).round().long() + zero[:, groups]
    return Rounded(numbers.clamp(0, most), scale, zero, groups)


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last dimension into int32, lowest bits first, or nibble i the number order[i] of eight."""
    runs = numbers.unflatten(-1, (-1, 32 // bits))
    if order is not None:
        runs = runs[..., list(order)]
    packed = (runs << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def pack_gptq(it: Rounded, bits: int, *, less: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": words(it.numbers, bits).T,
        "qzeros": words((it.zero - less).T, bits),
        "scales": it.scale.T.half(),
        "g_idx": it.group.int(),
    }


def pack_awq(it: Rounded, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": words(it.numbers.T, bits, AWQ_ORDER),
        "qzeros": words(it.zero.T, bits, AWQ_ORDER),
        "scales": it.scale.T.half(),
    }


def pack_compressed(it: Rounded, bits: int, *, sym: bool, act_order: bool) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(it.numbers, bits),
        "weight_scale": it.scale.half(),
        "weight_shape": torch.tensor(it.numbers.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = words(it.zero.T, bits).T
    if act_order:
        tensors["weight_g_idx"] = it.group.int()
    return tensors


def pack_int8(it: Rounded, bits: int) -> dict[str, Tensor]:
    assert bits == 8
    return {
        "weight": (it.numbers - 128).to(torch.int8),
        "weight_scale": it.scale.half(),
        "weight_zero_point": (it.zero - 128).to(torch.int8),
    }


class Case(NamedTuple):
    """A form of checkpoint: how to round, how to pack, and the configuration that says so."""

    round: Callable[[Tensor], Any]  # something that has `weights`
    pack: Callable[[Any], dict[str, Tensor]]
    config: dict[str, Any]


def gptq(bits: int, group: int, *, sym: bool = True, act_order: bool = False, version: str | None = None) -> Case:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym}
    if version:
        config["checkpoint_format"] = version
    less = 0 if version == "gptq_v2" else 1
    return Case(
        lambda weight: quantise(weight, bits, group, sym=sym, act_order=act_order),
        lambda it: pack_gptq(it, bits, less=less),
        config,
    )


def awq(group: int) -> Case:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Case(lambda weight: quantise(weight, 4, group, sym=False), lambda it: pack_awq(it, 4), config)


def compressed(bits: int, group: int, *, sym: bool = True, act_order: bool = False, whole: bool = False) -> Case:
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "channel" if group == -1 else "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if whole else "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }

    def pack(it: Rounded) -> dict[str, Tensor]:
        return pack_int8(it, bits) if whole else pack_compressed(it, bits, sym=sym, act_order=act_order)

    return Case(lambda weight: quantise(weight, bits, group, sym=sym, act_order=act_order), pack, config)


CASES = {
    "gptq 4 bits": gptq(4, 128),
    "gptq 4 bits, groups of 32, asymmetric": gptq(4, 32, sym=False),
    "gptq 4 bits, one group": gptq(4, -1, sym=False),
    "gptq 4 bits, activation order": gptq(4, 64, sym=False, act_order=True),
    "gptq 8 bits": gptq(8, 32),
    "gptq v2, 4 bits": gptq(4, 64, sym=False, version="gptq_v2"),
    "awq": awq(128),
    "awq, groups of 32": awq(32),
    "compressed 4 bits": compressed(4, 128),
    "compressed 4 bits, asymmetric": compressed(4, 32, sym=False),
    "compressed 4 bits, activation order": compressed(4, 64, act_order=True),
    "compressed 8 bits, by output": compressed(8, -1),
    "compressed int8": compressed(8, -1, whole=True),
    "compressed int8, groups, asymmetric": compressed(8, 64, sym=False, whole=True),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model before quantisation."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_hf(SPEC, folder)
    return folder


def write(plain: Path, folder: Path, case: Case, left: tuple[str, ...] = ("lm_head",)) -> tuple[Path, Path]:
    """Write the checkpoint, quantised but for the modules `left`, and one of floats that holds the same weights."""
    packed, exact = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in list(packed):
        module, _, kind = name.rpartition(".")
        if kind == "weight" and packed[name].dim() == 2 and "embed" not in name and not module.endswith(left):
            it = case.round(packed.pop(name))
            packed |= {f"{module}.{part}": tensor.contiguous() for part, tensor in case.pack(it).items()}
            exact[name] = it.weights().contiguous()
    config = json.loads((plain / "config.json").read_text())
    for tensors, about, into in ((packed, {"quantization_config": case.config}, "packed"), (exact, {}, "exact")):
        (folder / into).mkdir()
        save_file(tensors, folder / into / "model.safetensors")
        (folder / into / "config.json").write_text(json.dumps(config | about))
    return folder / "packed", folder / "exact"


def logits(folder: Path, quantization: QuantizationName = "auto") -> Tensor:
    return logits_of(load_model(folder, quantization=quantization))


def logits_of(model: Decoder) -> Tensor:
    ids, positions = torch.arange(40) * 11 % 512, torch.arange(40)
    return model.logits(model.forward(ids, positions, PlainAttend(model, positions, [40])))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checkpoint_is_what_its_weights_are(plain: Path, tmp_path: Path, case: Case) -> None:
    packed, exact = write(plain, tmp_path, case)
    wanted = logits(exact)
    assert torch.equal(logits(packed, "none"), wanted)
    assert torch.equal(logits(packed, "int8"), logits(exact, "int8"))
    model = load_model(packed)
    assert model.quantization == "blocks"
    found = logits_of(model)
    # The weights are the same: what differs is that rows are rounded to 8 bits in groups of 32, before each product.
    assert 0 < (found - wanted).square().mean().sqrt() < 0.02 * wanted.std()


def test_activation_order_reorders_inputs_and_stacks_what_differs(plain: Path, tmp_path: Path) -> None:
    packed, _ = write(plain, tmp_path, CASES["gptq 4 bits, activation order"])
    layer = load_model(packed).layers[0]
    assert isinstance(layer.out, ReorderedLinear)
    assert isinstance(layer.dense.wide, ReorderedLinear)  # gate and up have one order
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    _, _, v = layer.attention.project(x)
    torch.testing.assert_close(layer.attention.value(x), v)


def test_modules_that_are_left_stay_floats_beside_blocks(plain: Path, tmp_path: Path) -> None:
    packed, exact = write(plain, tmp_path, awq(32), ("lm_head", "v_proj"))
    model, wanted = load_model(packed), logits(exact)
    assert isinstance(model.layers[0].dense.wide, BlockLinear)
    assert (logits_of(model) - wanted).square().mean().sqrt() < 0.02 * wanted.std()
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    _, _, v = model.layers[0].attention.project(x)
    tensors = load_file(plain / "model.safetensors")
    own = "model.layers.0.self_attn.v_proj."
    torch.testing.assert_close(v.flatten(1), x @ tensors[own + "weight"].T + tensors[own + "bias"])
    assert isinstance(doors.fused_projection(model.layers[0].attention), StackedLinear)


class Turned(NamedTuple):
    """A rounded matrix that a checkpoint of floats holds as [inputs, outputs]."""

    rounded: Rounded

    def weights(self) -> Tensor:
        return self.rounded.weights().T


@pytest.mark.parametrize("case", ["gptq 4 bits, activation order", "gptq 8 bits", "awq, groups of 32"])
def test_gpt2_has_its_matrices_of_floats_alone_transposed(tmp_path: Path, case: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    model.save_pretrained(tmp_path / "plain")
    straight = CASES[case]
    turned = Case(
        lambda weight: Turned(straight.round(weight.T)), lambda it: straight.pack(it.rounded), straight.config
    )
    packed, exact = write(tmp_path / "plain", tmp_path, turned, ("wte", "wpe", "mlp.c_proj"))
    wanted = logits(exact)
    torch.testing.assert_close(logits(packed, "none"), wanted, rtol=0, atol=1e-4)
    for rounded in ("int8", "int4"):
        assert torch.equal(logits(packed, rounded), logits(exact, rounded))
    found = load_model(packed)
    assert found.quantization == "blocks"
    assert (logits_of(found) - wanted).square().mean().sqrt() < 0.02 * wanted.std()


def test_the_digest_holds_how_zeros_are_stored(plain: Path, tmp_path: Path) -> None:
    packed, _ = write(plain, tmp_path, gptq(4, 64))
    mode = numeric_mode("float32", "float32", "blocks")
    first = model_digest(packed, mode, cache_file=tmp_path / "hashes")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (packed / "config.json").write_text(json.dumps(config))
    assert model_digest(packed, mode, cache_file=tmp_path / "hashes") != first


def refused(folder: Path, *expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    for word in expected:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("'bitsandbytes'", "--quantization int4 or int8")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("'fp8'", "weight_block_size = [128, 128]")),
        ({"quant_method": "mxfp4"}, ("'mxfp4'",)),
        ({"bits": 4}, ("None", "awq, gptq")),
        ("gptq", ("None",)),
        ({"quant_method": "gptq", "bits": 3}, ("gptq", "bits = 3", "4, 8")),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ("marlin", "gptq_v2")),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ("gemv", "gemm")),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, ("float-quantized", "pack-quantized")),
        (compressed(4, 32).config | {"transform_config": {"config_groups": {"R1": {}}}}, ("transform_config",)),
        (compressed(4, 32).config | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparse-24-bitmask",)),
    ],
)  # fmt: skip
def test_other_methods_are_refused_by_name(plain: Path, tmp_path: Path, about: Any, expected: tuple[str, ...]) -> None:
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": about}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    refused(tmp_path, "quantised", *expected)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (gptq(4, 16), ("groups of 16", "multiple of 32", "--quantization none")),
        (gptq(8, 32, sym=False), ()),
    ],
)
def test_groups_that_are_no_blocks_are_refused_with_what_helps(
    plain: Path, tmp_path: Path, case: Case, expected: tuple[str, ...]
) -> None:
    packed, exact = write(plain, tmp_path, case)
    if expected:
        refused(packed, *expected)
    assert torch.equal(logits(packed, "none"), logits(exact, "none"))


def change(folder: Path, **tensors: Tensor | None) -> None:
    path = folder / "model.safetensors"
    found = load_file(path)
    for name, tensor in tensors.items():
        full = "model.layers.1.self_attn.o_proj." + name
        found.pop(full, None)
        if tensor is not None:
            found[full] = tensor
    save_file(found, path)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"qzeros": None}, ("o_proj.qzeros", "lack")),
        ({"scales": torch.ones(3, 128)}, ("o_proj.qzeros", "expected is (128, 3)")),
        ({"qweight": torch.zeros(17, 128, dtype=torch.int32)}, ("o_proj.qweight", "bits")),
        ({"qweight": torch.zeros(12, 128, dtype=torch.int32)}, ("3 bits",)),
        ({"g_idx": torch.zeros(128, dtype=torch.int32)}, ("o_proj", "groups of different sizes")),
        ({"g_idx": torch.full((128,), 9, dtype=torch.int32)}, ("o_proj", "groups of different sizes")),
        ({"qweight": torch.zeros((), dtype=torch.int32)}, ("o_proj: its tensors make no quantised matrix",)),
        ({"qzeros": torch.zeros(2, dtype=torch.float16)}, ("o_proj",)),
        ({"scales": torch.ones(0, 128)}, ("o_proj",)),
    ],
)
def test_damaged_tensors_are_refused(
    plain: Path, tmp_path: Path, tensors: dict[str, Tensor | None], expected: tuple[str, ...]
) -> None:
    packed, _ = write(plain, tmp_path, gptq(4, 64))
    change(packed, **tensors)
    refused(packed, *expected)
