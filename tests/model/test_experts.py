"""Mixtures of experts: who computes what, and the ways to keep their weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import Tensor

from afterglow.errors import ModelError
from afterglow.kernels.block import Block, ExpertPanels, Pair
from afterglow.kernels.built import native
from afterglow.kernels.matrix import Panels
from afterglow.model.checkpoint import Checkpoint
from afterglow.model.experts import Experts, Mlp
from afterglow.model.linear import BlockLinear, PanelLinear, PlainLinear
from afterglow.model.loader import load_model
from afterglow.model.spec import ExpertsSpec
from afterglow.model.stacked_experts import StackedExperts
from tests.model import families_hf, gguf_kit
from tests.model.test_parity import our_logits, their_logits

# Rows are whole blocks, and each token takes all experts: a choice that rounding flips is no small error.
WIDE = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 4}


class Counted(PlainLinear):
    """A matrix that keeps how many rows each call had."""

    __slots__ = ("calls",)

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.calls: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return super().__call__(x)


def mixture() -> tuple[Experts, list[Counted], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 4

    first = [Counted(weights(24, 16)) for _ in range(8)]
    mlps = [Mlp(wide, PlainLinear(weights(16, 12)), "silu", True) for wide in first]
    router = weights(8, 16)
    spec = ExpertsSpec(count=8, chosen=2, ffn=12, layers=(0,))
    return Experts(spec, PlainLinear(router), mlps), first, router


def test_only_chosen_experts_are_read_and_each_once() -> None:
    experts, first, router = mixture()
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    chosen = (x @ router.T).topk(2).indices
    counts = torch.bincount(chosen.flatten(), minlength=8).tolist()
    assert 0 in counts
    assert max(counts) > 1
    experts(x)
    assert [matrix.calls for matrix in first] == [[count] if count else [] for count in counts]


def test_a_row_does_not_depend_on_its_batch() -> None:
    experts, _, _ = mixture()
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([experts(row[None]) for row in x])
    torch.testing.assert_close(experts(x), alone, atol=1e-6, rtol=0)
    assert experts(x[:0]).shape == (0, 16)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> str:
    """A case of that shape."""
    package, prefix, config = families_hf.CASES["mixtral"]
    monkeypatch.setitem(families_hf.CASES, "mixtral-wide", (package, prefix, config | WIDE))
    return "mixtral-wide"


def test_experts_are_rounded_to_8_bits(wide: str, tmp_path: Path) -> None:
    families_hf.save_case(wide, tmp_path)
    exact = our_logits(load_model(tmp_path))
    error = (our_logits(load_model(tmp_path, quantization="int8")) - exact).std() / exact.std()
    assert 0 < error < 0.1  # eight products in a row; measured: 0.044


def test_blocks_of_experts_stay_blocks(wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families_hf.make_hf(wide)
    plain = gguf_kit.gguf_tensors(model)
    rounded = {
        name: torch.from_numpy(np.ascontiguousarray(quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)))
        for name, tensor in plain.items()
        if "exps" in name
    }
    gguf_kit.write_model(tmp_path / "plain.gguf", model)
    monkeypatch.setattr(gguf_kit, "gguf_tensors", lambda model, fused: plain | rounded)
    gguf_kit.write_model(tmp_path / "blocks.gguf", model, kinds=dict.fromkeys(rounded, GGMLQuantizationType.Q8_0))
    exact = our_logits(load_model(tmp_path / "plain.gguf"))
    kept = load_model(tmp_path / "blocks.gguf")
    assert kept.quantization == "blocks"
    mixed = kept.layers[0].mlp
    assert isinstance(mixed, Experts)
    assert all(isinstance(expert.wide, BlockLinear) for expert in mixed.experts)
    for decoder in (kept, load_model(tmp_path / "blocks.gguf", quantization="none")):
        error = (our_logits(decoder) - exact).std() / exact.std()
        assert 0 < error < 0.02


def test_experts_in_mxfp4_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, prefix, config = families_hf.CASES["gpt-oss"]
    monkeypatch.setitem(families_hf.CASES, "gpt-oss-wide", (package, prefix, config | WIDE))
    theirs = their_logits(families_hf.save_mxfp4(families_hf.make_hf("gpt-oss-wide"), tmp_path))
    plain = load_model(tmp_path, quantization="none")
    torch.testing.assert_close(our_logits(plain), theirs, atol=1e-4, rtol=0)
    kept = load_model(tmp_path)
    assert kept.quantization == "blocks"
    mixed = kept.layers[0].mlp
    assert isinstance(mixed, Experts)
    assert all(isinstance(expert.wide, BlockLinear) for expert in mixed.experts)
    assert 0 < (our_logits(kept) - theirs).std() / theirs.std() < 0.02


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("down_proj_blocks", torch.zeros(2, 8, 1, 16), "down_proj_blocks has dtype float32; supported is uint8"),
        ("down_proj_scales", torch.zeros(2, 8, 1, dtype=torch.int64), "down_proj_scales has dtype int64"),
        ("down_proj_blocks", torch.zeros(2, 8, 2, 16, dtype=torch.uint8), r"shape \(8, 2, 16\).*\(8, 1, 16\)"),
        ("down_proj_bias", torch.zeros(2, 8, dtype=torch.int32), "down_proj_bias has dtype int32"),
    ],
)
def test_stacked_experts_of_other_kinds_are_refused(name: str, tensor: Tensor, words: str, tmp_path: Path) -> None:
    tensors = {
        "x.experts.down_proj_blocks": torch.zeros(2, 8, 1, 16, dtype=torch.uint8),
        "x.experts.down_proj_scales": torch.zeros(2, 8, 1, dtype=torch.uint8),
    }
    save_file(tensors | {f"x.experts.{name}": tensor}, tmp_path / "model.safetensors")
    with StackedExperts(Checkpoint(tmp_path)) as source, pytest.raises(ModelError, match=words):
        source.get("x.experts.0.down_proj.weight", (8, 32))
        source.get("x.experts.0.down_proj.bias", (8,))


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    tensors = {"x.experts.down_proj_blocks": torch.zeros(2, 8, 1, 16, dtype=torch.uint8)}
    save_file(
        tensors | {"x.experts.down_proj_scales": torch.zeros(2, 8, 1, dtype=torch.uint8)},
        tmp_path / "model.safetensors",
    )
    with StackedExperts(Checkpoint(tmp_path)) as source, pytest.raises(ModelError, match=r"blocks of 32 .* rows of 48"):
        source.packed("x.experts.0.down_proj.weight", (8, 48))


@pytest.mark.skipif(native() is None, reason="needs the compiled kernels")
def test_experts_of_several_sizes_are_no_block() -> None:
    """The kernel has memory for the intermediate results of experts of the first one's size."""

    def panels(outputs: int, inputs: int) -> Panels:
        return PanelLinear(torch.zeros(outputs, inputs), None)

    pairs = [Pair(panels(2 * size, 32), panels(32, size)) for size in (16, 64)]
    norm = torch.ones(32), 1e-5
    gate = panels(2, 32)
    with pytest.raises(ValueError, match="sizes"):
        Block(panels(32, 32), norm, ExpertPanels(panels(2, 32), pairs, 1, True), norm)
    same = ExpertPanels(panels(2, 32), pairs[:1] * 2, 1, True)
    with pytest.raises(ValueError, match="one number"):
        Block(panels(32, 32), norm, same._replace(shared=pairs[0], shared_gate=gate), norm)
    Block(panels(32, 32), norm, same, norm)


def test_gguf_experts_in_mxfp4_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the files of gpt-oss have them, beside biases in floats."""
    package, prefix, config = families_hf.CASES["gpt-oss"]
    monkeypatch.setitem(families_hf.CASES, "gpt-oss-wide", (package, prefix, config | WIDE))
    model = families_hf.make_hf("gpt-oss-wide")
    plain = gguf_kit.gguf_tensors(model)
    rounded = {
        name: torch.from_numpy(np.ascontiguousarray(quantize(tensor.contiguous().numpy(), GGMLQuantizationType.MXFP4)))
        for name, tensor in plain.items()
        if name.endswith("exps.weight")
    }
    monkeypatch.setattr(gguf_kit, "gguf_tensors", lambda model, fused: plain | rounded)
    gguf_kit.write_model(tmp_path / "blocks.gguf", model, kinds=dict.fromkeys(rounded, GGMLQuantizationType.MXFP4))
    kept, floats = (load_model(tmp_path / "blocks.gguf", quantization=way) for way in ("auto", "none"))
    mixed = kept.layers[0].mlp
    assert isinstance(mixed, Experts)
    assert all(isinstance(expert.narrow, BlockLinear) for expert in mixed.experts)
    exact = our_logits(floats)
    assert 0 < (our_logits(kept) - exact).std() / exact.std() < 0.02


def test_damaged_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, prefix, config = families_hf.CASES["gpt-oss"]
    monkeypatch.setitem(families_hf.CASES, "gpt-oss-wide", (package, prefix, config | WIDE))
    families_hf.save_case("gpt-oss-wide", tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    for key, value, words in (
        ("num_local_experts", 6, "no part|asks for"),
        (
            "intermediate_size",
            96,
            r"down_proj has shape \(64, 96\) for each expert, config.json asks for \(96, 96\)|gate_up",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(about | {key: value}))
        with pytest.raises(ModelError, match=words):
            load_model(tmp_path)
